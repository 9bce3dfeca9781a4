# SPDX-License-Identifier: Apache-2.0
"""One rank's part of a training run: the step, the evaluation, and the state that a checkpoint holds.

A step: cut this rank's part of the global batch -> ids to the owners -> lookup -> pooled vectors back -> dense model
and loss -> backward (DDP sums dense gradients, pooled gradients go to the owners) -> update. If tables are larger than
memory, the ids of the next batch are sent first, so that its rows are fetched meanwhile.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sennit.offload.ingest.facts import TableFacts
from sennit.runtime.backend import coded_hook
from sennit.runtime.data.batch_source import BatchSource
from sennit.runtime.kernels.spec import TableSpec
from sennit.runtime.model.embedding import ROW_WISE_ADAGRAD, EmbeddingTables, ResidentTables, table_bytes
from sennit.runtime.model.exchange import Exchange, row_codec
from sennit.runtime.model.model import DenseModel
from sennit.runtime.model.optimizer import dense_optimizer
from sennit.runtime.model.sharding import Placement, place
from sennit.runtime.model.stored import StoredTables
from sennit.runtime.model.tensor_train import table_spec
from sennit.runtime.sharded.memory_limits import memory_limits
from sennit.runtime.sharded.phases import PhaseClock
from sennit.runtime.training.config import TrainingConfig
from sennit.runtime.training.metrics import Quality, quality_of_ranks
from sennit.transport.codecs import COLLECTIVE_CODECS, Codec
from sennit.transport.errors import SennitError


class TrainingError(SennitError):
    """Training cannot go on. The message names the step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """What the display gets after each step."""

    step: int
    """Steps done."""

    step_count: int
    epoch: int
    loss: float
    """The mean over this rank's part of the batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrival:
    """A batch whose ids the owners of the tables have received."""

    number: int
    counts: list[int]
    """The number of samples of each rank."""

    dense: Tensor
    labels: Tensor
    bags: Any
    """The batch as the embedding tables announced it."""

    is_lent: bool
    """Whether the tensors belong to the source, which must be told when they are no longer used."""


class Trainer:
    """Owns model, tables, optimizers and the position in the data. Every method is collective."""

    def __init__(self, config: TrainingConfig, source: BatchSource) -> None:
        self.config = config
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        config.check_world(self.world_size)
        self.clock = PhaseClock()
        self.source, self.order = source, source.order
        self.steps_per_epoch, self.step_count = self.order.steps_per_epoch, self.order.step_count
        self.rate_factor = config.schedule(self.step_count)
        self.step = 0
        self.run_id = "0" * 16
        """The id of the run that this trainer belongs to (`resumption`)."""

        self.tables = source.tables
        self.placement: Placement = place(
            self.tables,
            world_size=self.world_size,
            dim=config.embedding_dim,
            table_bytes=[table_bytes(self.spec_of(table)) for table in self.tables],
            # Tables on a disk have another limit.
            limit_bytes=memory_limits(config.rank_memory_bytes) if config.table_store is None else None,
        )
        own = [self.tables[table] for table in self.placement.tables_of[self.rank]]
        rows = dataclasses.replace(
            ROW_WISE_ADAGRAD,
            weight_decay=config.weight_decay,
            max_gradient=config.clip_value,
            max_gradient_norm=config.clip_norm,
        )
        self.embedding: EmbeddingTables
        if config.table_store is None or not own:
            self.embedding = ResidentTables(
                own, dim=config.embedding_dim, seed=config.seed, optimizer=rows, tensor_train=config.tensor_train
            )
        else:
            with self.clock.phase("table store"):
                self.embedding = StoredTables(
                    own,
                    config.table_store,
                    rank=self.rank,
                    dim=config.embedding_dim,
                    seed=config.seed,
                    clock=self.clock,
                    timeout_s=config.timeout_s,
                    optimizer=rows,
                )
        # The exchange of ids is collective: either all ranks work ahead or none.
        self._batches_ahead = 0 if config.table_store is None else StoredTables.batches_ahead
        self.arrived: deque[Arrival] = deque()
        """Batches that are announced, but not computed yet."""
        self.exchange = Exchange(
            self.placement,
            dim=config.embedding_dim,
            clock=self.clock,
            codec=None if config.exchange is None else row_codec(config.exchange, config.embedding_dim),
        )
        self.dense = DenseModel(
            dense_count=source.dense_count,
            table_count=len(self.tables),
            dim=config.embedding_dim,
            bottom=config.bottom,
            top=config.top,
            seed=config.seed,
        )
        self.replicated = DistributedDataParallel(self.dense, gradient_as_bucket_view=True)
        if config.gradient is not None:
            codec = Codec(kind=COLLECTIVE_CODECS[config.gradient])
            self.replicated.register_comm_hook(None, coded_hook(codec))
        self.optimizer = dense_optimizer(
            config.dense_optimizer,
            self.replicated.parameters(),
            rate=config.dense_rate,
            weight_decay=config.weight_decay,
        )

    def run(
        self,
        on_step: Callable[[StepReport], None],
        on_epoch: Callable[[int, Quality], None],
        on_checkpoint: Callable[[int], None],
        is_awaited: Callable[[], bool] | None = None,
    ) -> Quality | None:
        """Trains to the end, evaluates after each epoch, and returns the last evaluation.

        `is_awaited` is called before each step. If it returns True, training stops there and the result is None.
        """
        result: Quality | None = None
        while self.step < self.step_count:
            if is_awaited is not None and is_awaited():
                return None
            loss = self.train_step()
            done = self.step == self.step_count
            epoch = (self.step - 1) // self.steps_per_epoch
            on_step(StepReport(step=self.step, step_count=self.step_count, epoch=epoch, loss=loss))
            every = self.config.checkpoint_every
            if self.config.checkpoint is not None and (done or (every is not None and self.step % every == 0)):
                with self.clock.phase("checkpoint", is_whole=True):
                    on_checkpoint(self.step)
            if done or self.step % self.steps_per_epoch == 0:
                result = self.evaluate()
                on_epoch(epoch, result)
        return result if result is not None else self.evaluate()

    def train_step(self) -> float:
        """Takes one step on the next global batch, and returns the loss of this rank's part."""
        factor = self.rate_factor(self.step)
        # Only up to the next evaluation, which takes other batches.
        end = min((self.step // self.steps_per_epoch + 1) * self.steps_per_epoch, self.step_count)
        until = min(self.step + 1 + self._batches_ahead, end)
        batch = self._next([self.order.training_batch(step) for step in range(self.step, until)])
        with self.clock.phase("lookup"):
            pooled = self.embedding.lookup(batch.bags).view(-1, self.config.embedding_dim).requires_grad_()
        with self.clock.phase("dense forward"):
            vectors = self.exchange.return_pooled(pooled, batch.counts)
            logits = self.replicated(batch.dense, vectors)
            loss = F.binary_cross_entropy_with_logits(logits, batch.labels)
            value = loss.item()
        if not math.isfinite(value):
            raise TrainingError(
                f"loss is {value} at step {self.step + 1} on rank {self.rank}; try lower learning rates "
                f"(now {self.config.dense_rate} dense, {self.config.sparse_rate} sparse)"
            )
        with self.clock.phase("backward and AllReduce"):
            self.optimizer.zero_grad()
            # Gradients are averaged over ranks, so a rank with more samples than the mean must weigh more.
            share = batch.counts[self.rank] * self.world_size / self.config.batch_size
            torch.autograd.backward(loss if share == 1 else loss * share)
        if batch.is_lent:
            self.source.release(batch.number)
        with self.clock.phase("dense update"):
            self._clip_dense()
            for part in self.optimizer.param_groups:
                part["lr"] = self.config.dense_rate * factor
            self.optimizer.step()
        with self.clock.phase("sparse update"):
            assert pooled.grad is not None
            self.embedding.update(batch.bags, pooled.grad.flatten(), rate=self.config.sparse_rate * factor)
        self.step += 1
        return value

    def _next(self, numbers: Sequence[int]) -> Arrival:
        """Returns the first of these batches. The others are then announced to the tables, if those work ahead."""
        for number in numbers[len(self.arrived) :]:
            with self.clock.phase("input"):
                batch = self.source.take(number)
            counts = self.order.counts(number, self.world_size)
            bags = self.embedding.announce(self.exchange.send_ids(batch, counts))
            is_lent = self._batches_ahead == 0
            dense, labels = batch.dense, batch.labels
            if not is_lent:
                # A source lends one batch at a time.
                dense, labels = dense.clone(), labels.clone()
                self.source.release(number)
            self.arrived.append(
                Arrival(number=number, counts=counts, dense=dense, labels=labels, bags=bags, is_lent=is_lent)
            )
        return self.arrived.popleft()

    def _clip_dense(self) -> None:
        """Clips the dense gradient. Averaged gradients are equal on all ranks, so the clipped ones are, too."""
        if self.config.clip_value is not None:
            nn.utils.clip_grad_value_(self.dense.parameters(), self.config.clip_value, foreach=False)
        if self.config.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.dense.parameters(), self.config.clip_norm, foreach=False)

    @torch.no_grad()
    def evaluate(self) -> Quality:
        """Exact metrics over all evaluation rows, the same on every rank."""
        with self.clock.phase("evaluation", is_whole=True):
            logits, labels = [], []
            training, self.arrived = self.arrived, deque()
            numbers = self.order.evaluation_batches(self.step)
            for place in range(len(numbers)):
                batch = self._next(numbers[place : place + 1 + self._batches_ahead])
                pooled = self.embedding.lookup(batch.bags).view(-1, self.config.embedding_dim)
                self.embedding.release(batch.bags)
                logits.append(self.dense(batch.dense, self.exchange.return_pooled(pooled, batch.counts)))
                labels.append(batch.labels.clone())
                if batch.is_lent:
                    self.source.release(batch.number)
            self.arrived = training
            return quality_of_ranks(torch.cat(logits), torch.cat(labels))

    @property
    def own_tables(self) -> tuple[str, ...]:
        """Names of the tables that this rank owns."""
        return self.embedding.names

    def spec_of(self, table: TableFacts) -> TableSpec:
        """The engine's spec of any table of the run, whoever owns it."""
        return table_spec(table, dim=self.config.embedding_dim, rule=self.config.tensor_train)

    def weights(self) -> dict[str, Tensor]:
        """The weights that this rank holds, by global names."""
        return self._dense_weights() | self.embedding.weights()

    def _dense_weights(self) -> dict[str, Tensor]:
        return {f"dense.{name}": parameter.detach() for name, parameter in self.dense.named_parameters()}

    def state(self) -> dict[str, Any]:
        """Everything that a checkpoint holds.

        Loading fills these tensors; `restore` copies those that the trainer does not own.
        """
        from sennit.runtime.training import dcp

        state: dict[str, Any] = self._dense_weights() | self.embedding.state()
        dense = dcp.optimizer_state(self.replicated, self.optimizer)
        state.update({f"optimizer.{name}": value for name, value in dense.items()})
        # Order of samples and initial weights follow from seed and position, so no generator is saved.
        state["position"] = {"step": self.step}
        return state

    def restore(self, state: dict[str, Any]) -> None:
        """Takes over a loaded `state`, which must be of the same run, as far as its tensors are not the trainer's own
        memory.
        """
        from sennit.runtime.training import dcp

        prefix = "optimizer."
        dense = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
        dcp.restore_optimizer(self.replicated, self.optimizer, dense)
        while self.arrived:
            self.embedding.release(self.arrived.popleft().bags)
        self.embedding.restore(state)
        self.step = self.embedding.step = int(state["position"]["step"])

    def close(self) -> None:
        """Removes files that exist for the run only."""
        self.embedding.close()
