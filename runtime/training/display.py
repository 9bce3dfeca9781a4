# SPDX-License-Identifier: Apache-2.0
"""Progress of a training run: a live bar on a terminal, occasional lines elsewhere, TensorBoard events."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from sennit.command_line import busy
from sennit.runtime.data.packages import require
from sennit.runtime.training.left_out import NAMED_MAX
from sennit.runtime.training.metrics import Evaluation
from sennit.runtime.training.trainer import StepReport

# A log file should stay readable: at most one line in this many seconds between epochs.
PLAIN_INTERVAL_S = 5.0
NO_WAIT = ("", 0.0)


class Listener(Protocol):
    """The interface of displays: what rank 0 reports."""

    def on_step(self, report: StepReport) -> None: ...
    def on_evaluation(self, evaluation: Evaluation) -> None: ...
    def on_wait(self, what: str) -> contextlib.AbstractContextManager[None]:
        """What is done meanwhile takes long and is no step: `what`, as "saving a checkpoint"."""
        ...

    def close(self) -> None: ...


class WaitColumn(ProgressColumn):
    """What the steps wait for, and for how many seconds. Empty while they go on."""

    def render(self, task: Task) -> Text:
        what, began = task.fields["wait"]
        return Text(f"{what} {time.monotonic() - began:.0f} s" if what else "")


class ConsoleDisplay:
    """A progress bar, or plain lines if there is no terminal."""

    def __init__(self, console: Console, *, batch_size: int) -> None:
        self._console = console
        self._batch_size = batch_size
        self._began = self._last_line = time.monotonic()
        self._first_step: int | None = None
        self._left_out = 0
        self._bar: Progress | None = None
        self._task: Any = None

    def on_step(self, report: StepReport) -> None:
        now = time.monotonic()
        if self._first_step is None:
            self._first_step, self._began = report.step, now
            self._open_bar(report)
        for one in report.left_out[: max(0, NAMED_MAX - self._left_out)]:
            self._console.print(one.text(), soft_wrap=True)
        self._left_out += len(report.left_out)
        rate = (report.step - self._first_step) * self._batch_size / max(now - self._began, 1e-9)
        if self._bar is not None:
            epoch = report.epoch + 1
            self._bar.update(self._task, completed=report.step, report=report, epoch=epoch, rate=f"{rate:,.0f}")
        elif now - self._last_line >= PLAIN_INTERVAL_S:
            self._last_line = now
            of = "" if report.step_count is None else f"/{report.step_count} epoch {report.epoch + 1}"
            self._console.print(f"step {report.step}{of} loss {report.loss:.4f} {rate:,.0f} samples/s")

    def on_evaluation(self, evaluation: Evaluation) -> None:
        qualities = "; ".join(f"{name}: {one.text()}" for name, one in evaluation.labels.items())
        when = evaluation.window or f"epoch {evaluation.epoch}"
        self._console.print(
            f"{when} (step {evaluation.step}): {qualities or evaluation.quality.text()}"
            + (f"; on validation samples: {evaluation.validation.text()}" if evaluation.validation is not None else "")
        )

    @contextlib.contextmanager
    def on_wait(self, what: str) -> Iterator[None]:
        if self._bar is None:
            with busy(what):
                yield
            return
        self._bar.update(self._task, wait=(what, time.monotonic()), refresh=True)
        try:
            yield
        finally:
            self._bar.update(self._task, wait=NO_WAIT, refresh=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _open_bar(self, report: StepReport) -> None:
        if not self._console.is_terminal:
            return
        self._bar = Progress(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(),
            TextColumn("step {task.completed}") if report.step_count is None else MofNCompleteColumn(),
            # Ten times a second: the loss is read when it is shown.
            TextColumn("loss {task.fields[report].loss:.4f}  {task.fields[rate]} samples/s"),
            TimeRemainingColumn(),
            WaitColumn(),
            console=self._console,
        )
        fields: dict[str, Any] = {"report": report, "epoch": report.epoch + 1, "rate": "0", "wait": NO_WAIT}
        self._task = self._bar.add_task("", total=report.step_count, **fields)
        self._bar.start()


class TensorBoardLog:
    """TensorBoard scalars by step: loss, AUC, normalised entropy, calibration, GAUC."""

    def __init__(self, folder: Path) -> None:
        module = require("torch.utils.tensorboard", package="tensorboard", purpose="--tensorboard")
        self._writer: Any = module.SummaryWriter(str(folder))

    def on_step(self, report: StepReport) -> None:
        self._writer.add_scalar("loss/train", report.loss, report.step)

    def on_evaluation(self, evaluation: Evaluation) -> None:
        for part, quality in (("quality", evaluation.quality), ("validation", evaluation.validation)):
            if quality is not None:
                self._writer.add_scalar(f"{part}/auc", quality.auc, evaluation.step)
                self._writer.add_scalar(f"{part}/normalised_entropy", quality.normalised_entropy, evaluation.step)
                self._writer.add_scalar(f"{part}/calibration", quality.calibration, evaluation.step)
                if quality.gauc is not None and quality.gauc.auc is not None:
                    self._writer.add_scalar(f"{part}/gauc", quality.gauc.auc, evaluation.step)
        for name, quality in evaluation.labels.items():
            self._writer.add_scalar(f"quality/auc/{name}", quality.auc, evaluation.step)
            self._writer.add_scalar(f"quality/normalised_entropy/{name}", quality.normalised_entropy, evaluation.step)
            if quality.gauc is not None and quality.gauc.auc is not None:
                self._writer.add_scalar(f"quality/gauc/{name}", quality.gauc.auc, evaluation.step)

    def on_wait(self, what: str) -> contextlib.AbstractContextManager[None]:
        del what
        return contextlib.nullcontext()

    def close(self) -> None:
        self._writer.close()


class Listeners:
    """Combines several listeners, and closes them at the end. Ranks other than 0 have none."""

    def __init__(self, listeners: Sequence[Listener]) -> None:
        self._listeners = tuple(listeners)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for listener in self._listeners:
            listener.close()

    def on_step(self, report: StepReport) -> None:
        for listener in self._listeners:
            listener.on_step(report)

    def on_evaluation(self, evaluation: Evaluation) -> None:
        for listener in self._listeners:
            listener.on_evaluation(evaluation)

    @contextlib.contextmanager
    def on_wait(self, what: str) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for listener in self._listeners:
                stack.enter_context(listener.on_wait(what))
            yield
