# SPDX-License-Identifier: Apache-2.0
"""What an elastic run has behind it, from one group of ranks to the next."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from sennit.offload.sketch import Sketch
from sennit.runtime.data.batch_source import BatchSource
from sennit.runtime.timeline.trace_file import with_word
from sennit.runtime.training.rebalance import Moved
from sennit.runtime.training.report import Change


@dataclass(kw_only=True, slots=True)
class History:
    """One for each rank. Changes and moves are equal on all ranks, once a newcomer has been told them."""

    changes: list[Change] = field(default_factory=list)
    moved: Moved = field(default_factory=Moved)
    counted: Sketch | None = None
    """The ids that feeders sent to this rank in earlier groups, for `--sketch`."""

    def count(self, source: BatchSource) -> None:
        """Adds what a source has counted that is about to end."""
        found = source.sketch()
        if found is None:
            return
        found = found.since(None)
        if self.counted is not None:
            found.merge(self.counted)
        self.counted = found

    @property
    def sketch_note(self) -> str:
        """What is to be known about a sketch of this run; empty if its ranks have never changed."""
        if not self.changes:
            return ""
        texts = "; ".join(str(change).partition(":")[0] for change in self.changes)
        what = "Counts of lost ranks are missing. Samples that were fed again count again."
        return f"The ranks of this run changed: {texts}. {what}"


def numbered(path: Path, group: int) -> Path:
    """The file of a run's groups, from 1: run.json.gz, run.2.json.gz, …"""
    return path if group == 1 else with_word(path, f"{group}")
