# SPDX-License-Identifier: Apache-2.0
"""Training with ranks that come and go: it continues without ranks that die, and with ranks that join.

A run is then a chain of stretches (`stretch`). A stretch ends in one of three ways. The run ends. Or a rank fails, and
the live ranks begin the next stretch from the last checkpoint. Or newcomers wait at the end of a step, and the members
keep their state and hand it over (`handover`). docs/how-to/train.md says what the weights are equal to.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import warnings
from dataclasses import asdict
from typing import Any, Final

import torch
import torch.distributed as dist

from sennit.runtime.backend.elastic import reconfigure, waiting_count
from sennit.runtime.backend.torch_versions import Store, default_store
from sennit.runtime.data.batch_source import BatchSource
from sennit.runtime.ingest.fed import group_failure
from sennit.runtime.sharded.tables import shard_name, shards_of
from sennit.runtime.timeline.left import take_left, write_recordings
from sennit.runtime.timeline.spans import TimelineError
from sennit.runtime.timeline.timeline import Timeline, of_this_start
from sennit.runtime.timeline.trace_file import numbered
from sennit.runtime.training.config import TrainingConfig
from sennit.runtime.training.handover import Claim, Holding, find_source, take_over
from sennit.runtime.training.report import Change, RunReport
from sennit.runtime.training.resumption import go_back
from sennit.runtime.training.stretch import History, begin_run, shown_by, tell, tell_timeline, train
from sennit.runtime.training.supply import MakeSource, served
from sennit.runtime.training.trainer import Trainer
from sennit.transport.errors import ConfigError, PeerError, SennitError
from sennit.transport.meeting.membership import Terms

TERMS_KEY: Final = "sennit/train/terms"
WORD_LETTERS: Final = 1000
# Settings that a newcomer may choose. All others decide what is computed, or which calls are collective.
OWN_CHOICES: Final = ("resume", "elastic", "min_ranks", "rank_memory_bytes", "timeout_s", "tensorboard", "json_path")


def publish_terms(store: Store, config: TrainingConfig) -> None:
    """Publishes the settings that newcomers must share with this run."""
    store.set(TERMS_KEY, json.dumps(_terms(config)))


def check_terms(store: Store, config: TrainingConfig) -> None:
    """A newcomer checks its settings before it announces itself. Raises ConfigError that lists the differences."""
    if not store.check([TERMS_KEY]):
        raise ConfigError(
            "nobody can join the run at this address: it has not begun, or is not elastic; start it with --elastic"
        )
    theirs, ours = json.loads(store.get(TERMS_KEY)), _terms(config)
    differing = [name for name in ours if theirs.get(name) != ours[name]]
    if differing:
        raise ConfigError(
            "a rank that joins needs the options of the run; "
            + ", ".join(f"{name} is {ours[name]!r} here and {theirs.get(name)!r} there" for name in differing)
        )


class ElasticRun:
    """One rank's part of all stretches. The default process group exists already, and every change replaces it."""

    def __init__(
        self, config: TrainingConfig, make_source: MakeSource, *, is_newcomer: bool, shows: bool = False
    ) -> None:
        """`shows`: whether this rank says what goes on even while it is not rank 0."""
        self._config = config
        self._shows = shows
        self._make_source = make_source
        self._begins_alone = not is_newcomer
        self._history = History()
        self._holding: Holding | None = None
        self._run_id = ""
        """Empty until this rank knows it."""

    def run(self) -> RunReport:
        """Trains until a stretch reaches the run's end."""
        while True:
            reason = ""
            try:
                if (report := self._stretch()) is not None:
                    return report
            except Exception as error:
                # Going on does not cure an error of this rank itself.
                reason = group_failure(error)
                if not reason:
                    _leave_word(error)
                    raise
            # The frames of the error or of the stretch kept the trainer, and so the old group, alive.
            gc.collect()
            self._change(reason)

    def _stretch(self) -> RunReport | None:
        """Runs one stretch. Returns None if newcomers wait, and then keeps this rank's part of the state."""
        number = len(self._history.changes) + 1
        path = self._config.timeline
        timeline = None if path is None else Timeline(numbered(path, number), writes_left=False)
        with served(self._make_source(), is_elastic=True) as source:
            try:
                outcome = train(
                    self._config,
                    source,
                    self._history,
                    begin=self._begin,
                    timeline=timeline,
                    is_awaited=self._is_awaited,
                )
            except Exception as error:
                if group_failure(error):
                    self._count(source)
                raise
            if isinstance(outcome, RunReport):
                return outcome
            self._count(source)
            source.close(goes_on=True)
        self._holding = outcome
        return None

    def _count(self, source: BatchSource) -> None:
        if self._config.sketch_path is not None:
            self._history.count(source)

    def _change(self, reason: str) -> None:
        before = dist.get_world_size()
        store = default_store()
        view = reconfigure(Terms(timeout_s=self._config.timeout_s, min_world=self._config.min_ranks))
        lost = sorted(set(range(before)) - set(view.previous_ranks))
        if reason and not lost:
            raise PeerError(f"all ranks live, so going on would end like this again: {reason}")
        reason = "; ".join([reason, *_words_of(lost, store)])
        joined = [rank for rank, previous in enumerate(view.previous_ranks) if previous is None]
        self._history.changes.append(Change(lost=lost, joined=joined, world_size=view.world, reason=reason))
        self._begins_alone = False

    def _begin(self, trainer: Trainer) -> None:
        """Brings a new trainer to the run's position: by a handover, else from the checkpoint, else at the start."""
        if self._begins_alone:
            begin_run(trainer)
            self._run_id = trainer.run_id
            return
        claim = None if self._holding is None else Claim(step=self._holding.step, shards=self._holding.shards)
        gathered: list[Any] = [None] * trainer.world_size
        mine = (claim, self._history.changes, self._history.moved, self._history.windows, self._run_id)
        dist.all_gather_object(gathered, mine)
        # Members come before newcomers, so rank 0 knows the run's history.
        _, self._history.changes, self._history.moved, windows, _ = gathered[0]
        # The trainer has this list.
        self._history.windows[:] = windows
        self._run_id = next((run_id for *_, run_id in gathered if run_id), "")
        self._write_left()
        if not self._run_id:
            # The first group ended before it had agreed on a run.
            begin_run(trainer)
            self._run_id = trainer.run_id
            return
        trainer.run_id = self._run_id
        shards = [shard_name(trainer.tables.tables, shard) for shard in shards_of(trainer.tables.tables)]
        source = find_source([claim for claim, *_ in gathered], shards)
        lines: list[str] = []
        with shown_by(trainer.rank == 0 or self._shows, "loading the state of the run"):
            if source is not None:
                take_over(trainer, source, self._holding)
                dist.barrier()
            else:
                lines = go_back(trainer)
        tell(trainer, lines)
        self._holding = None

    def _write_left(self) -> None:
        """Writes the timelines of earlier groups, if they failed: of the ranks of all hosts that have a rank here."""
        if self._config.timeline is None:
            return
        groups = [numbered(self._config.timeline, number + 1) for number in range(len(self._history.changes))]
        paths = [of_this_start(path) for path in groups]
        is_first = dist.get_rank() == 0
        found: list[Any] | None = [None] * dist.get_world_size() if is_first else None
        dist.gather_object([take_left(path) for path in paths], found)
        for path, *by_rank in zip(paths, *found or (), strict=True):
            recordings = list(itertools.chain.from_iterable(by_rank))
            if not recordings:
                continue
            try:
                left = write_recordings(recordings, path)
            except (OSError, TimelineError) as failure:
                warnings.warn(f"no timeline in {path}: {failure}", RuntimeWarning, stacklevel=2)
            else:
                tell_timeline(str(left), path)

    def _is_awaited(self) -> bool:
        """Whether a newcomer waits and there is work for one more rank. The answer is the same on all ranks."""
        if dist.get_world_size() >= min(self._config.slices, self._config.batch_size):
            return False
        waiting = torch.tensor([waiting_count() if dist.get_rank() == 0 else 0])
        dist.broadcast(waiting, src=0)
        return bool(waiting.item())


def _leave_word(error: Exception) -> None:
    """Says in the group's store why this rank ends. Others see of it only that its process is gone."""
    text = str(error).partition("\n")[0] or type(error).__name__
    if not isinstance(error, SennitError):
        text = f"{type(error).__name__}: {text}"
    # What matters is the error, which is raised again.
    with contextlib.suppress(RuntimeError):
        default_store().set(_word_key(dist.get_rank()), text[:WORD_LETTERS])


def _words_of(lost: list[int], store: Store) -> list[str]:
    """What these ranks of an earlier group have left in its store."""
    keys = {rank: _word_key(rank) for rank in lost}
    return [f"rank {rank} said: {store.get(key).decode()}" for rank, key in keys.items() if store.check([key])]


def _word_key(rank: int) -> str:
    return f"sennit/train/ended/{rank}"


def _terms(config: TrainingConfig) -> dict[str, Any]:
    """The shared settings after a round trip through JSON, so that both sides compare the same values."""
    chosen = {name: value for name, value in asdict(config).items() if name not in OWN_CHOICES}
    # Each rank has its own addresses for feeders.
    chosen["ingest"] = config.ingest is not None
    terms: dict[str, Any] = json.loads(json.dumps(chosen, default=str))
    return terms
