# SPDX-License-Identifier: Apache-2.0
"""One stretch of a run: training in one group of ranks, until the run ends or newcomers wait.

An elastic run has several. Its `History` goes from one stretch to the next.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch.distributed as dist

from sennit.command_line import busy, json_text, stdout_console, write_whole
from sennit.offload.sketch import Sketch
from sennit.runtime.backend.process_group import BACKEND_NAME, communicator
from sennit.runtime.checkpoint.digest import digest
from sennit.runtime.data.batch_source import BatchSource
from sennit.runtime.telemetry.process_cost import CostMeter
from sennit.runtime.timeline.timeline import Timeline
from sennit.runtime.training import resumption
from sennit.runtime.training.best import Best
from sennit.runtime.training.config import TrainingConfig
from sennit.runtime.training.display import ConsoleDisplay, Listener, Listeners, TensorBoardLog
from sennit.runtime.training.handover import Holding
from sennit.runtime.training.ids_page import IdsPage
from sennit.runtime.training.metrics import Evaluation
from sennit.runtime.training.rebalance import Moved
from sennit.runtime.training.report import Change, EmbeddingSize, RankReport, RunReport, render
from sennit.runtime.training.trainer import StepReport, Trainer


@dataclass(kw_only=True, slots=True)
class History:
    """What an elastic run has behind it: changes of its ranks, moves of shards, counted ids. Each rank has one.

    Changes and moves are equal on all ranks, once a newcomer has been told them.
    """

    changes: list[Change] = field(default_factory=list)
    moved: Moved = field(default_factory=Moved)
    windows: list[Evaluation] = field(default_factory=list)
    """The evaluations of a run that trains window after window."""

    counted: Sketch | None = None
    """The ids that feeders sent to this rank in earlier groups, for `--sketch`."""

    def count(self, source: BatchSource) -> None:
        """Adds the ids that `source` has counted. The source is about to end."""
        found = source.sketch()
        if found is None:
            return
        found = found.since(None)
        if self.counted is not None:
            found.merge(self.counted)
        self.counted = found

    def save_sketch(self, source: BatchSource, path: Path) -> None:
        """Sums what all ranks have counted, and writes it on rank 0. Collective. Nothing is written if a rank has no
        sketch.
        """
        found: list[Sketch | None] = [None] * dist.get_world_size()
        own = source.sketch()
        if own is not None and self.counted is not None:
            own.merge(self.counted)
        dist.all_gather_object(found, own)
        sketches = [sketch for sketch in found if sketch is not None]
        if dist.get_rank() == 0 and len(sketches) == len(found):
            total = sketches[0]
            for other in sketches[1:]:
                total.merge(other)
            total.note = self._sketch_note
            total.save(path)

    @property
    def _sketch_note(self) -> str:
        """A warning for readers of this run's sketch; empty if its ranks have never changed."""
        if not self.changes:
            return ""
        texts = "; ".join(str(change).partition(":")[0] for change in self.changes)
        what = "Counts of lost ranks are missing. Samples that were fed again count again."
        return f"The ranks of this run changed: {texts}. {what}"


Begin = Callable[[Trainer], None]


def train(
    config: TrainingConfig,
    source: BatchSource,
    history: History,
    *,
    begin: Begin,
    timeline: Timeline | None,
    is_awaited: Callable[[], bool] | None = None,
) -> RunReport | Holding:
    """Trains in the default process group. Rank 0 prints and writes. Collective.

    `begin` brings the new trainer to the position where this stretch starts. `history`: of an elastic run so far; the
    step at which training goes on is stored in its last change. If `is_awaited` returns True at the end of a step,
    training stops and this rank's part of the state is returned.
    """
    before = transport_counters(config.backend)
    try:
        with timeline or contextlib.nullcontext(), Trainer(config, source, timeline) as trainer:
            return _train(trainer, history, begin, is_awaited, before)
    finally:
        if timeline is not None and timeline.is_written:
            tell_timeline("all ranks", timeline.path)
        elif timeline is not None and timeline.left is not None:
            tell_timeline(str(timeline.left), timeline.left.path)


def _train(
    trainer: Trainer,
    history: History,
    begin: Begin,
    is_awaited: Callable[[], bool] | None,
    before: dict[str, int],
) -> RunReport | Holding:
    config, source, first = trainer.config, trainer.source, trainer.rank == 0
    trainer.windows = history.windows
    begin(trainer)
    tell(trainer, [str(trainer.overlap)])
    if not trainer.order.waits(trainer.step):
        source.begin(trainer.next_batch)
    first_step = trainer.step
    if trainer.rebalancer is not None:
        trainer.rebalancer.moved = history.moved
    changes = history.changes
    if changes:
        changes[-1] = replace(changes[-1], step=first_step)
        if first:
            stdout_console().print(str(changes[-1]))
    last: list[StepReport] = []
    ids = IdsPage(trainer.rank, trainer.world_size, trainer.tables.id_counters)
    best = Best(trainer)

    listeners: list[Listener] = []
    if first:
        listeners.append(ConsoleDisplay(stdout_console(), batch_size=config.batch_size))
        if config.tensorboard is not None:
            listeners.append(TensorBoardLog(config.tensorboard))
    with (
        contextlib.closing(ids),
        _telling_stop(trainer),
        Listeners(listeners) as heard,
        CostMeter(program_ns=source.program_ns) as meter,
    ):

        def on_step(step: StepReport) -> None:
            last[:] = [step]
            ids.show()
            heard.on_step(step)

        def on_evaluation(evaluation: Evaluation) -> bool:
            heard.on_evaluation(evaluation)
            return best.hear(evaluation)

        def on_checkpoint(step: int) -> None:
            with heard.on_wait("saving a checkpoint"):
                resumption.save(trainer, saver)

        def on_files(reason: str) -> contextlib.AbstractContextManager[None]:
            if first and not stdout_console().is_terminal:
                stdout_console().print(f"waits for files: {reason}", soft_wrap=True)
            return heard.on_wait(f"waiting for files: {reason}")

        began = time.perf_counter()
        with contextlib.nullcontext() if config.checkpoint is None else resumption.saver_of(config) as saver:
            if best.is_over:
                with heard.on_wait("evaluating"):
                    result: Evaluation | None = trainer.evaluation()
            else:
                result = trainer.run(on_step, on_evaluation, on_checkpoint, is_awaited, heard.on_wait, on_files)
            if saver is not None:
                with heard.on_wait("finishing the checkpoint"), trainer.clock.phase("checkpoint", is_whole=True):
                    saver.finish()
        run_s, cost = time.perf_counter() - began, meter.read()
    if result is None:
        return Holding.of(trainer)

    after = transport_counters(config.backend)
    mine = RankReport(
        tables=sorted({shard.rpartition("/")[0] for shard in trainer.own_shards}),
        phases_s=dict(trainer.clock.seconds),
        beside_s=dict(trainer.clock.beside),
        cost=cost,
        counters={name: count - before.get(name, 0) for name, count in after.items()},
        ingest=source.counters(),
        rows=trainer.tables.cache_counters(),
        ids=trainer.tables.id_counters(),
    )
    gathered: list[RankReport | None] = [None] * trainer.world_size
    dist.all_gather_object(gathered, mine)
    report = RunReport(
        config=config,
        ranks=[rank for rank in gathered if rank is not None],
        sample_count=(trainer.step - first_step) * config.batch_size,
        first_step=first_step,
        run_s=run_s,
        step=trainer.step,
        final_loss=last[0].loss if last else None,
        quality=result.quality,
        validation=result.validation,
        labels=result.labels,
        windows=trainer.windows,
        left_out=trainer.left_out,
        best=best.found,
        best_text=best.text(),
        run_id=trainer.run_id,
        weights_sha256=digest(trainer.weights()),
        changes=changes,
        looks=history.moved.looks,
        moves=history.moved.moves,
        predicted_step_s=trainer.predicted_s,
        embedding=EmbeddingSize.of(trainer.tables.tables),
        data=config.source.data if config.ingest is None else source.order.name,
    )
    if first:
        render(report, stdout_console())
        if config.json_path is not None:
            write_whole(config.json_path, json_text(report.as_json(), indent=2))
    if config.sketch_path is not None:
        history.save_sketch(source, config.sketch_path)
    # No rank leaves while another one still needs an answer.
    dist.barrier()
    return report


@contextlib.contextmanager
def _telling_stop(trainer: Trainer) -> Iterator[None]:
    """Rank 0 says after which step it was interrupted."""
    try:
        yield
    except KeyboardInterrupt:
        tell(trainer, [f"stopped after step {trainer.step}"])
        raise


def begin_run(trainer: Trainer) -> None:
    """Begins or resumes the run. Rank 0 prints what is resumed."""
    what = f"resuming from {trainer.config.checkpoint}" if trainer.config.resume else "starting"
    with shown_by(trainer.rank == 0, what):
        lines = resumption.begin(trainer)
    tell(trainer, lines)


def shown_by(here: bool, what: str) -> contextlib.AbstractContextManager[None]:
    """`busy` on one rank of those that do the same: `here`."""
    return busy(what) if here else contextlib.nullcontext()


def tell_timeline(whose: str, path: Path) -> None:
    """Prints what to do with a file."""
    stdout_console().print(f"timeline of {whose}: sennit timeline {path}", soft_wrap=True)


def tell(trainer: Trainer, lines: Sequence[str]) -> None:
    """Rank 0 prints lines for people."""
    if trainer.rank == 0:
        for line in lines:
            stdout_console().print(line, soft_wrap=True)


def transport_counters(backend: str) -> dict[str, int]:
    """The counters of the default group if its backend is sennit; other backends have none."""
    return communicator().counters() if backend == BACKEND_NAME else {}
