# SPDX-License-Identifier: Apache-2.0
"""The dense part of a model: a module on every rank, run slice by slice, with the same bits in every world."""

from typing import TYPE_CHECKING

from sennit.exports import exporter

if TYPE_CHECKING:
    from sennit.runtime.replicas.cutting import Along as Along
    from sennit.runtime.replicas.replicas import SlicedReplicas as SlicedReplicas

__getattr__ = exporter(
    __name__,
    {
        "Along": "cutting",
        "SlicedReplicas": "replicas",
    },
)
