# SPDX-License-Identifier: Apache-2.0
"""Sharded training whose bits do not depend on the ranks: tables in shards, and the global batch in slices.

What decides bits belongs to the model: slices, row shards, column shards. Where they lie belongs to the run.
`SlicedReplicas` is the dense part: a module on every rank, run slice by slice.
"""

from typing import TYPE_CHECKING

from sennit.exports import exporter

if TYPE_CHECKING:
    from sennit.runtime.sharded.cutting import Along as Along
    from sennit.runtime.sharded.replicas import SlicedReplicas as SlicedReplicas
    from sennit.runtime.sharded.slices import Slices as Slices

__getattr__ = exporter(
    __name__,
    {
        "Along": "cutting",
        "SlicedReplicas": "replicas",
        "Slices": "slices",
    },
)
