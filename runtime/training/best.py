# SPDX-License-Identifier: Apache-2.0
"""The best evaluation of a run, its checkpoint, and the end of a run that gets no better (Prechelt 1998, "Early
stopping - but when?").

The checkpoint is the only one in the folder `best` inside the run's folder, so a run that resumes, or that lost ranks,
finds there how good it was.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Final

from sennit.command_line import json_text
from sennit.runtime.backend.first_rank import on_first
from sennit.runtime.checkpoint import folder as checkpoint
from sennit.runtime.checkpoint.manifest import CheckpointError
from sennit.runtime.training import resumption
from sennit.runtime.training.metrics import METRICS, Evaluation
from sennit.runtime.training.trainer import Trainer, TrainingError

FOLDER: Final = "best"
DOCUMENT: Final = "quality.json"


class Best:
    """The best evaluation so far. With `--stop-early` also its checkpoint. Equal on all ranks."""

    def __init__(self, trainer: Trainer) -> None:
        """Takes up what the run's folder has. Collective."""
        self._trainer, self._metric, self._patience = trainer, trainer.config.best_by, trainer.config.stop_early
        self.found: Evaluation | None = None
        if self._patience is not None:
            with resumption.reading_folders():
                self.found = on_first(self._look)

    @property
    def folder(self) -> Path | None:
        """Where the best checkpoint is; None: it is not kept."""
        return None if self._patience is None else self._folder

    @property
    def _folder(self) -> Path:
        assert self._trainer.config.checkpoint is not None
        return self._trainer.config.checkpoint / FOLDER

    def hear(self, new: Evaluation) -> bool:
        """Takes an evaluation, and saves the checkpoint if it is the best. Returns whether to stop. Collective.

        Raises TrainingError on every rank if `--stop-early` has nothing to compare.
        """
        if self._patience is not None and new.judged.undefined:
            raise TrainingError(
                f"--stop-early needs {METRICS[self._metric]}, which is not defined: {new.judged.undefined}; "
                "hold back samples of both classes, or leave --stop-early out"
            )
        if new.window:
            # Windows are of different samples, so none is better than another.
            return False
        if self.found is None or new.loss(self._metric) < self.found.loss(self._metric):
            self.found = new
            if self._patience is not None:
                with self._trainer.clock.phase("checkpoint", is_whole=True):
                    resumption.save_whole(self._trainer, self._folder, {DOCUMENT: _text(new)})
        return self.is_over

    @property
    def is_over(self) -> bool:
        """Whether the run has gone on long enough without a better evaluation."""
        if self._patience is None or self.found is None:
            return False
        order = self._trainer.order
        return order.evaluations(self._trainer.step) - order.evaluations(self.found.step) >= self._patience

    def text(self) -> str:
        """The best evaluation in words; empty unless the run went on after it."""
        if self.found is None or self.found.step == self._trainer.step:
            return ""
        where = f", kept in {self.folder}" if self.folder is not None else "; --stop-early N keeps such a checkpoint"
        return self.found.text(self._metric) + where

    def _look(self) -> Evaluation | None:
        path = checkpoint.latest_of(self._folder, self._trainer.run_id)
        if path is None:
            return None
        try:
            return Evaluation.from_json(json.loads((path / DOCUMENT).read_text(encoding="utf-8")))
        except ValueError as error:
            raise CheckpointError(f"{path / DOCUMENT} is not what a run wrote: {error}") from error


def _text(evaluation: Evaluation) -> str:
    return json_text(asdict(evaluation), indent=2)
