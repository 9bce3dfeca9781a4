# SPDX-License-Identifier: Apache-2.0
"""Dense parameters and copied tables: gradients of all ranks added in one order, cut into pieces."""

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
