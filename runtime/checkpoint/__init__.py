# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a run: the folder, its manifest, what reads and writes it, torch's DCP."""

from typing import TYPE_CHECKING

from sennit.exports import exporter

if TYPE_CHECKING:
    from sennit.runtime.checkpoint.digest import digest as digest
    from sennit.runtime.checkpoint.manifest import CheckpointError as CheckpointError
    from sennit.runtime.checkpoint.manifest import Manifest as Manifest
    from sennit.runtime.checkpoint.writing import Saver as Saver

__getattr__ = exporter(
    __name__,
    {
        "CheckpointError": "manifest",
        "Manifest": "manifest",
        "Saver": "writing",
        "digest": "digest",
    },
)
