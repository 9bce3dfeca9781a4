# SPDX-License-Identifier: Apache-2.0
"""One rank's part of a training run: the step, the evaluation, and the state that a checkpoint holds.

A step is what a user's program would do: look up (`ShardedEmbeddingBags`, or `ShardedEmbeddings` for histories), run
the model slice by slice (`SlicedReplicas`), backward, `optimizer.step()`. The backward pass updates rows. Later batches
are taken, and their ids sent, meanwhile (`BatchesAhead`). If tables are in files, their rows are then fetched, too.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sennit.closing import Closing
from sennit.runtime.backend.process_group import local_ranks
from sennit.runtime.data.batch_source import BatchSource
from sennit.runtime.data.numbering import Numbering
from sennit.runtime.memory.large_buffers import keep_large_buffers
from sennit.runtime.model.factory import build, dense_optimizer, reads_histories
from sennit.runtime.model.loss import Loss
from sennit.runtime.pipeline.ahead import Batch, BatchesAhead
from sennit.runtime.pipeline.exchanges import Exchanges
from sennit.runtime.pipeline.scheduler import Scheduler
from sennit.runtime.replicas.replicas import SlicedReplicas
from sennit.runtime.sharded.module import ShardedEmbeddingBags, ShardedEmbeddings, ShardedTables
from sennit.runtime.sharded.phases import PhaseClock
from sennit.runtime.stream.following import FollowingSource
from sennit.runtime.stream.running import told
from sennit.runtime.timeline.timeline import Timeline
from sennit.runtime.training.config import TrainingConfig
from sennit.runtime.training.left_out import LeftOut, LeftOutSamples, described, without
from sennit.runtime.training.metrics import Evaluation, Quality
from sennit.runtime.training.overlap import overlap_of
from sennit.runtime.training.planned import homes_of, memory_of, model_inputs, placement_of
from sennit.runtime.training.predictions import Predictions
from sennit.runtime.training.rebalance import Rebalancer
from sennit.runtime.training.supply import Given, Supply
from sennit.transport.errors import SennitError

DENSE, OPTIMIZER, TABLES = "dense.", "optimizer.", "tables."
"""Prefixes of the names of parameters, of their optimizer's states, and of tables' tensors in a state."""

LOST = "lost."
"""Error feedback of a rank is `lost.RANK/WORLD.PARAMETER` in a state. Ranks of another world have no use for it."""


class TrainingError(SennitError):
    """Training cannot go on. The message names the step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """A step that was taken."""

    step: int
    """Steps done."""

    step_count: int | None
    """Steps of the run; None: nobody knows."""

    epoch: int
    samples: int
    """This rank's part of the batch."""

    loss_sum: Tensor
    """The loss summed over these samples, 0-dim, on the model's device."""

    left_out: tuple[LeftOut, ...] = ()
    """Samples of all ranks that it left out, because their loss was not finite."""

    @property
    def loss(self) -> float:
        """The mean over this rank's part of the batch. Waits for the device that computes it."""
        return float(self.loss_sum) / self.samples


class Trainer(Closing):
    """Owns model, tables, optimizers and the position in the data. Every method is collective."""

    def __init__(
        self,
        config: TrainingConfig,
        source: BatchSource,
        timeline: Timeline | None = None,
        clock: PhaseClock | None = None,
    ) -> None:
        """`clock`: counts the phases; default: one of time, or that of the timeline."""
        keep_large_buffers()
        self.config, self._timeline = config, timeline
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        config.check_world(self.world_size)
        self.clock = clock or (PhaseClock() if timeline is None else timeline.clock())
        self.source = source
        follows = config.stream.follow is not None
        # The steps of a run that follows its files are not known.
        self.rate_factor = config.schedule((follows and config.max_steps) or self.step_count)
        self.step = 0
        self.owes_evaluation = False
        """Whether the evaluation that follows `step` is still to be done: a checkpoint comes before it."""

        self.windows: list[Evaluation] = []
        """The evaluations so far, if each is of another window of time."""

        self.left_out = LeftOutSamples()
        """Samples that steps of this trainer have left out."""

        self.run_id = "0" * 16
        """The id of the run that this trainer belongs to (`resumption`)."""

        self.device = _device(config, self.rank)
        tables = config.tables_of(source.tables)
        self.reads_histories = reads_histories(config.model)
        limits = memory_of(config, tables, self.device)
        self.overlap = overlap_of(config)
        planned = placement_of(config, source, tables, limits, local_ranks(), self.overlap)
        self.predicted_s = planned.step_s
        self.rebalancer: Rebalancer | None = None
        # A single rank has nothing to move.
        if config.rebalance is not None and self.world_size > 1:
            self.rebalancer = Rebalancer(config.rebalance, planned.problem, source, self.step_count)
        with self.clock.phase("tables", is_whole=True):
            made = ShardedEmbeddings if self.reads_histories else ShardedEmbeddingBags
            self.tables: ShardedTables = made(
                tables,
                outputs="nested" if self.reads_histories else "dict",
                lr=config.sparse_rate,
                placement=planned.placement,
                slices=config.slices,
                gradients="sum",
                seed=config.seed,
                device=self.device,
                codec=config.exchange_codec,
                rank_memory_bytes=limits[homes_of(config).memory][self.rank],
                store=config.table_store and replace(config.table_store, timeout_s=config.timeout_s),
                clock=self.clock,
            )
        # Elastic runs tell an error of this rank alone from the end of a group, so the others find it gone.
        scheduler = Scheduler(on_task=None if timeline is None else timeline.on_task)
        self._supply = Supply(source, depth=config.batches_ahead, device=self.device, clock=self.clock)
        self._ahead = BatchesAhead(scheduler, [self.tables], depth=config.batches_ahead, tells=not config.elastic)
        self.loss = Loss(config.loss, len(source.label_names))
        self.model = build(config.model, model_inputs(config, source, tables)).to(self.device)
        self.replicas = SlicedReplicas(
            self.model,
            slices=config.slices,
            seed=config.seed,
            codec=config.gradient_codec,
            clock=self.clock,
        )
        if self.reads_histories:
            # It takes 15 ms to import, as its operators are torch's.
            from sennit.runtime.kernels import attention

            attention.watch(functools.partial(self.clock.phase, "attention"))
        self._exchanges: Exchanges | None = None
        if self.overlap.has_tables:
            self._exchanges = Exchanges(scheduler, [self.tables], self._ahead, replicas=self.replicas)
        self.optimizer = dense_optimizer(
            config.dense_optimizer,
            self.model.parameters(),
            rate=config.dense_rate,
            weight_decay=config.weight_decay or 0.0,
        )

    def run(
        self,
        on_step: Callable[[StepReport], None],
        on_evaluation: Callable[[Evaluation], bool],
        on_checkpoint: Callable[[int], None],
        is_awaited: Callable[[], bool] | None = None,
        on_wait: Callable[[str], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
        on_files: Callable[[str], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> Evaluation | None:
        """Trains to the end, evaluates where `order` says, and returns the last evaluation.

        `on_wait` is entered around what takes long and is no step, and `on_files` around a wait for files, with what
        is missing.
        `on_evaluation` returns whether the run is to end there. The answer is the same on all ranks.
        `is_awaited` is called before each step. If it returns True, training stops there and the result is None.
        """
        result: Evaluation | None = None
        report: StepReport | None = None
        saved = self.step

        def save() -> None:
            nonlocal saved
            if report is not None and saved != self.step:
                self._save(report, on_checkpoint)
            saved = self.step

        def is_over() -> bool:
            """Whether the evaluation that is due, if one is, ends the run."""
            nonlocal result
            if not self.owes_evaluation:
                return False
            if report is not None:
                self._check_loss(report)
            with on_wait("evaluating"):
                result = self.evaluation()
            return on_evaluation(result)

        while not is_over():
            if self.order.waits(self.step):
                self._await_more(save, on_files)
                continue
            if self.step == self.step_count:
                break
            if is_awaited is not None and is_awaited():
                return None
            with contextlib.nullcontext() if self._timeline is None else self._timeline.step(self.step):
                report = self.train_step()
            on_step(report)
            every = self.config.checkpoint_every
            done = self.step == self.step_count and not self.order.waits(self.step)
            if done or (every is not None and self.step % every == 0):
                save()
            if is_over():
                break
            if self.rebalancer is not None and not done and self.step % self.rebalancer.every == 0:
                with self.clock.phase("rebalance", is_whole=True):
                    self.rebalancer.look(self.tables, self.step)
        save()
        if result is None:
            with on_wait("evaluating"):
                result = self.evaluation()
        return result

    def _await_more(
        self, save: Callable[[], None], on_files: Callable[[str], contextlib.AbstractContextManager[object]]
    ) -> None:
        """Waits for more samples, or for the news that there are none. A run that is ended meanwhile has a checkpoint.

        Raises DataError for files that cannot be those of the run.
        """
        assert isinstance(self.source, FollowingSource)
        evaluated = self.order.evaluates(self.step)
        reason = self.source.grow()
        if self.order.waits(self.step):
            save()
        while self.order.waits(self.step):
            told = reason
            with on_files(told):
                while self.order.waits(self.step) and reason == told:
                    reason = self.source.grow(pauses=True)
        self.owes_evaluation = not evaluated and self.order.evaluates(self.step)

    @property
    def order(self) -> Numbering:
        return self.source.order

    @property
    def steps_per_epoch(self) -> int:
        return self.order.steps_per_epoch

    @property
    def step_count(self) -> int:
        """The steps of the run, or those that are known so far."""
        return self.order.step_count

    @property
    def next_batch(self) -> int:
        """The number of the batch that `run` takes first."""
        return self.order.next_batch(self.step, evaluates=self.owes_evaluation)

    def _save(self, report: StepReport, on_checkpoint: Callable[[int], None]) -> None:
        if self.config.checkpoint is not None:
            self._check_loss(report)
            with self.clock.phase("checkpoint", is_whole=True):
                on_checkpoint(self.step)

    def train_step(self) -> StepReport:
        """Takes one step on the next global batch.

        In host memory, a loss that is not finite raises `TrainingError` before anything is changed. On a device nothing
        waits for the loss: `run` checks it before evaluations and checkpoints, and tables refuse such gradients.
        """
        factor = self.rate_factor(self.step)
        if self._exchanges is not None:
            self._exchanges.step = self.step
        # Only up to the next evaluation, which takes other batches, and until shards may move.
        end = self.order.next_evaluation(self.step + 1)
        if self.rebalancer is not None:
            end = min(end, self.rebalancer.next_look(self.step))
        until = min(self.step + 1 + self._ahead.depth, end)
        batch = self._next([self.order.training_batch(step) for step in range(self.step, until)])
        given, size = self._supply.samples(batch), batch.global_batch
        vectors = self.tables(batch.sent[0])
        with self.clock.phase("dense forward"):
            logits, losses = self._losses(given, vectors, size)
            left_out: list[LeftOut] = []
            if self.config.skip_samples:
                losses, left_out = self._finite(batch, given, vectors, logits, losses)
            report = StepReport(
                step=self.step + 1,
                step_count=None if self.order.grows else self.step_count,
                epoch=self.step // self.steps_per_epoch,
                samples=given.labels.shape[0],
                loss_sum=losses.detach().sum(),
                left_out=tuple(left_out),
            )
        if self.device.type == "cpu":
            self._check_loss(report)
        _set_rate(self.tables.optimizer, self.config.sparse_rate * factor)
        with self.clock.phase("dense backward"):
            self.optimizer.zero_grad()
            torch.autograd.backward(self.replicas.loss(losses, size))
        self._supply.release(batch)
        with self.clock.phase("dense update"):
            self._clip_dense()
            _set_rate(self.optimizer, self.config.dense_rate * factor)
            self.optimizer.step()
        self.step += 1
        self.owes_evaluation = self.order.evaluates(self.step)
        return report

    def _logits(self, given: Given, vectors: Any, global_batch: int | None) -> Tensor:
        integers = (given.integers,) if self.reads_histories else ()
        logits: Tensor = self.replicas(given.dense, vectors, *integers, global_batch=global_batch)
        return logits

    def _losses(self, given: Given, vectors: Any, global_batch: int | None) -> tuple[Tensor, Tensor]:
        """The logits of this rank's samples, and the loss of each slice."""
        logits = self._logits(given, vectors, global_batch)
        own = given.labels, given.weights
        losses: Tensor = self.replicas.each_slice(self.loss, logits, *own, global_batch=global_batch)
        return logits, losses

    def _finite(
        self, batch: Batch, given: Given, vectors: Any, logits: Tensor, losses: Tensor
    ) -> tuple[Tensor, list[LeftOut]]:
        """The loss of each slice without the samples whose loss is not finite, and those of all ranks. Collective.

        Raises `TrainingError` on all ranks if the run has left out as many as it may.
        """
        found: list[LeftOut] = []
        size = batch.global_batch
        if not bool(losses.detach().isfinite().all()):
            is_bad = ~self.loss.is_finite(logits.detach(), given.labels)
            (own,) = batch.features
            tables = [table.name for table in self.source.tables]
            vectors = {name: vectors[name] for name in tables}
            first = 0 if size is None else self.replicas.slices.own_samples(size).start
            found = described(is_bad, step=self.step + 1, first=first, batch=own, tables=tables, vectors=vectors)
            kept = without(is_bad, given, vectors)
            # The same random numbers as before.
            self.replicas.passes -= 1
            _, losses = self._losses(*kept, size)
        new = self.left_out.add(found)
        if self.left_out.count > self.config.skip_samples:
            raise TrainingError(
                f"{self.left_out.count} samples have a loss that is not finite; allowed: {self.config.skip_samples} "
                f"(--skip-samples). {new[-1].text()}"
            )
        return losses, new

    def _check_loss(self, report: StepReport) -> None:
        if not math.isfinite(report.loss):
            raise TrainingError(
                f"loss is {report.loss} at step {report.step} on rank {self.rank}; try lower learning rates "
                f"(now {self.config.dense_rate} dense, {self.config.sparse_rate} sparse)"
            )

    def _next(self, numbers: Sequence[int]) -> Batch:
        """Returns the first of these batches. The others are then on their way."""
        for number in numbers[len(self._ahead) :]:
            self._ahead.begin(number, functools.partial(self._supply.take, number))
        with self.clock.phase("wait for input") if self._ahead.depth else contextlib.nullcontext():
            return self._ahead.next()

    def _clip_dense(self) -> None:
        """Clips the dense gradient. Sums are equal on all ranks, so the clipped ones are, too."""
        if self.config.clip_value is not None:
            nn.utils.clip_grad_value_(self.model.parameters(), self.config.clip_value, foreach=False)
        if self.config.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip_norm, foreach=False)

    def evaluate(self) -> Quality:
        """Exact metrics over all evaluation rows, the same on every rank and in every world."""
        return self.evaluation().quality

    @torch.no_grad()
    def evaluation(self) -> Evaluation:
        """The same, and over all validation rows, if there are any."""
        with self.clock.phase("evaluation", is_whole=True):
            self._ahead.drop()
            numbers = self.order.evaluation_batches(self.step)
            self.replicas.eval()
            cut, names = self.order.validation_batches, self.source.label_names
            kept = {"has_groups": self.config.gauc is not None, "leaves_out": self.config.skip_samples > 0}
            validation, evaluation = ([Predictions(**kept) for _ in names] for _ in range(2))
            for place in range(len(numbers)):
                self._predict(numbers, place, validation if place < cut else evaluation)
            self.replicas.train()
            self.owes_evaluation = False
            # Collective, and so in the same order on all ranks.
            qualities = {name: found.quality_of_ranks() for name, found in zip(names, evaluation, strict=True)}
            made = Evaluation(
                step=self.step,
                epoch=-(-self.step // self.steps_per_epoch),
                quality=qualities[names[0]],
                validation=validation[0].quality_of_ranks() if cut else None,
                labels=qualities if len(qualities) > 1 else {},
                window=self.order.evaluated(self.step),
            )
            if made.window:
                # A run that went back evaluates again.
                self.windows[:] = [one for one in self.windows if one.step < self.step] + [made]
            return made

    def _predict(self, numbers: Sequence[int], place: int, into: Sequence[Predictions]) -> None:
        """Adds predictions of a batch of an evaluation, this rank's part, by label. The next ones are on their way."""
        batch = self._next(numbers[place : place + 1 + self._ahead.depth])
        given = self._supply.samples(batch)
        vectors = self.tables(batch.sent[0])
        if len(given.labels):
            logits = self._logits(given, vectors, batch.global_batch)
            shape = (-1, len(into))
            columns = zip(logits.cpu().reshape(shape).T, given.labels.cpu().reshape(shape).T, strict=True)
            groups = None if given.groups is None else given.groups.numpy()
            for found, (scores, wanted) in zip(into, columns, strict=True):
                found.add(scores.numpy(), wanted.numpy(), groups)
        self._supply.release(batch)

    @property
    def own_shards(self) -> tuple[str, ...]:
        """Names of the shards that this rank holds."""
        return self.tables.held_names

    def weights(self) -> dict[str, Tensor]:
        """The weights that this rank holds, by global names."""
        held = self.tables.state_dict()
        return self._dense_weights() | {
            f"{TABLES}{name}": value for name, value in held.items() if name.endswith(".weight")
        }

    def _dense_weights(self) -> dict[str, Tensor]:
        return {f"{DENSE}{name}": tensor.detach() for name, tensor in self.model.state_dict().items()}

    def state(self) -> dict[str, Any]:
        """Everything that a checkpoint holds. With increments, `changes` then counts from here.

        Loading fills these tensors; `restore` takes over those that the trainer does not own.
        """
        if self.config.checkpoint_increments:
            self.tables.track_changes()
        return self.whole_state()

    def whole_state(self) -> dict[str, Any]:
        """What `state` returns, for a checkpoint that no increment follows."""
        return self._state(self.tables.state_dict())

    def changes(self) -> dict[str, Any]:
        """What an incremental checkpoint holds: the rows that changed since the last save, and everything else."""
        return self._state(self.tables.changes())

    @property
    def in_files(self) -> list[str]:
        """The shards, by their names in a state, of which `state` has copies."""
        return [f"{TABLES}{shard}" for shard in self.tables.in_files]

    def _state(self, tables: Mapping[str, Any]) -> dict[str, Any]:
        from sennit.runtime.checkpoint import dcp

        state: dict[str, Any] = self._dense_weights()
        state.update({f"{TABLES}{name}": value for name, value in tables.items()})
        dense = dcp.optimizer_state(self.model, self.optimizer)
        state.update({f"{OPTIMIZER}{name}": value for name, value in dense.items()})
        state |= self._lost()
        # Order of samples and initial weights follow from seed and position, so no generator is saved.
        state["position"] = {"step": self.step, "passes": self.replicas.passes}
        if (scales := self.source.scales(self.step)) is not None:
            state["position"]["scales"] = told(scales)
        return state

    def _lost(self) -> dict[str, Tensor]:
        """Error feedback of this rank: what coding took from its gradients, float32; empty without a codec."""
        residuals = self.replicas.residuals
        if residuals is None:
            return {}
        lost = residuals.state_dict()["lost"]
        return {
            f"{self._lost_prefix}{name}": lost.get(name, torch.zeros(parameter.shape))
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
        }

    @property
    def _lost_prefix(self) -> str:
        return f"{LOST}{self.rank}/{self.world_size}."

    def restore(self, state: dict[str, Any]) -> None:
        """Takes over a loaded `state`, which must be of the same run. Error feedback may be missing: it begins anew."""
        from sennit.runtime.checkpoint import dcp

        def part(prefix: str) -> dict[str, Any]:
            return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}

        dcp.restore_optimizer(self.model, self.optimizer, part(OPTIMIZER))
        self._ahead.drop()
        self.tables.load_state_dict(part(TABLES))
        self.step, self.replicas.passes = int(state["position"]["step"]), int(state["position"]["passes"])
        self.source.restore_scales(self.step, state["position"].get("scales"))
        if self.replicas.residuals is not None:
            # Rounding is to nearest: the number of calls decides nothing.
            place = {"rank": self.rank, "world": self.world_size, "calls": self.step}
            self.replicas.residuals.load_state_dict(place | {"lost": part(self._lost_prefix)})

    def close(self, *, failed: bool = False) -> None:
        """Ends work ahead, and removes files that exist for the run only. `failed`: this rank gives up."""
        if failed:
            self._ahead.abort()
        if self._exchanges is not None:
            self._exchanges.close(failed=failed)
        self._ahead.close(failed=failed)
        self.tables.close()
        if self.reads_histories:
            from sennit.runtime.kernels import attention

            attention.watch(None)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(failed=error is not None)


def _device(config: TrainingConfig, rank: int) -> torch.device:
    """The device of this rank. Ranks of a host take its GPUs in turn."""
    if config.device == "cpu":
        return torch.device("cpu")
    device = torch.device(config.device, int(os.environ.get("LOCAL_RANK", rank)) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
