# SPDX-License-Identifier: Apache-2.0
"""One rank's part of a training run: the step, the evaluation, the state that a checkpoint holds.

A step: cut this rank's part of the global batch -> ids to the owners -> lookup -> pooled vectors back ->
dense model and loss -> backward (DDP sums dense gradients, pooled gradients go to the owners) -> update.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel

from sennit.runtime.dlrm.embedding import embedding_engine
from sennit.runtime.dlrm.exchange import Exchange
from sennit.runtime.dlrm.model import DenseModel
from sennit.runtime.dlrm.optimizer import dense_optimizer, rate_factor
from sennit.runtime.dlrm.sharding import Placement, place
from sennit.runtime.ingest.source import BatchSource
from sennit.runtime.metrics import Quality, quality
from sennit.runtime.phases import PhaseClock
from sennit.runtime.training_config import TrainingConfig
from sennit.transport.errors import ConfigError, SennitError

# The flattened form has one entry a parameter name and kind, which DCP can read at any world size.
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class TrainingError(SennitError):
    """Training cannot go on; the message names the step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """What the display gets after each step."""

    step: int
    """Steps done."""

    step_count: int
    epoch: int
    loss: float
    """Mean of this rank's part of the batch."""


class Trainer:
    """Owns model, tables, optimizers and the position in the data. Every method is collective."""

    def __init__(self, config: TrainingConfig, source: BatchSource) -> None:
        self.config = config
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        config.check_world(self.world_size)
        self.clock = PhaseClock()
        self.source, self.order = source, source.order
        self.steps_per_epoch, self.step_count = self.order.steps_per_epoch, self.order.step_count
        self.step = 0

        self.tables = source.tables
        self.placement: Placement = place(self.tables, world_size=self.world_size, dim=config.embedding_dim)
        own = [self.tables[table] for table in self.placement.tables_of[self.rank]]
        self.embedding = embedding_engine(own, dim=config.embedding_dim, seed=config.seed)
        self.exchange = Exchange(self.placement, dim=config.embedding_dim, clock=self.clock)
        self.dense = DenseModel(
            dense_count=source.dense_count,
            table_count=len(self.tables),
            dim=config.embedding_dim,
            bottom=config.bottom,
            top=config.top,
            seed=config.seed,
        )
        self.replicated = DistributedDataParallel(self.dense, gradient_as_bucket_view=True)
        self.optimizer = dense_optimizer(config.dense_optimizer, self.replicated.parameters(), rate=config.dense_rate)

    def run(
        self,
        on_step: Callable[[StepReport], None],
        on_epoch: Callable[[int, Quality], None],
        on_checkpoint: Callable[[int], None],
        is_awaited: Callable[[], bool] | None = None,
    ) -> Quality | None:
        """Trains to the end, evaluates after each epoch, and returns the last evaluation.

        `is_awaited` is asked before each step; once it is true training stops there, and the result is None.
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
                with self.clock.phase("checkpoint"):
                    on_checkpoint(self.step)
            if done or self.step % self.steps_per_epoch == 0:
                result = self.evaluate()
                on_epoch(epoch, result)
        return result if result is not None else self.evaluate()

    def train_step(self) -> float:
        """One step on the next global batch; the loss of this rank's part."""
        factor = rate_factor(self.config.decay, self.step, self.step_count)
        number = self.order.training_batch(self.step)
        counts = self.order.counts(number, self.world_size)
        with self.clock.phase("input"):
            batch = self.source.take(number)
        bags = self.exchange.send_ids(batch, counts)
        with self.clock.phase("lookup"):
            pooled = self.embedding.lookup(bags).view(-1, self.config.embedding_dim).requires_grad_()
        with self.clock.phase("dense forward"):
            vectors = self.exchange.return_pooled(pooled, counts)
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
            # Gradients are averaged over ranks: a rank with more samples than the mean counts for more.
            share = counts[self.rank] * self.world_size / self.config.batch_size
            torch.autograd.backward(loss if share == 1 else loss * share)
        self.source.release(number)
        with self.clock.phase("dense update"):
            for part in self.optimizer.param_groups:
                part["lr"] = self.config.dense_rate * factor
            self.optimizer.step()
        with self.clock.phase("sparse update"):
            assert pooled.grad is not None
            self.embedding.update(bags, pooled.grad.flatten(), rate=self.config.sparse_rate * factor)
        self.step += 1
        return value

    @torch.no_grad()
    def evaluate(self) -> Quality:
        """Exact metrics over all evaluation rows; the same on every rank."""
        with self.clock.phase("evaluation"):
            logits, labels = [], []
            for number in self.order.evaluation_batches(self.step):
                counts = self.order.counts(number, self.world_size)
                batch = self.source.take(number)
                bags = self.exchange.send_ids(batch, counts)
                pooled = self.embedding.lookup(bags).view(-1, self.config.embedding_dim)
                logits.append(self.dense(batch.dense, self.exchange.return_pooled(pooled, counts)))
                labels.append(batch.labels.clone())
                self.source.release(number)
            both = gather_rows(torch.stack((torch.cat(logits), torch.cat(labels)), 1))
            return quality(both[:, 0].numpy(), both[:, 1].numpy())

    @property
    def own_tables(self) -> tuple[str, ...]:
        """Names of the tables that this rank owns."""
        return tuple(spec.name for spec in self.embedding.specs)

    def weights(self) -> dict[str, Tensor]:
        """The weights this rank holds, under global names."""
        named = {f"dense.{name}": parameter.detach() for name, parameter in self.dense.named_parameters()}
        named.update({f"table.{name}": self.embedding.weight(name) for name in self.own_tables})
        return named

    def state(self) -> dict[str, Any]:
        """All that a checkpoint holds; tensors are the trainer's own memory, so that loading fills them."""
        state: dict[str, Any] = dict(self.weights())
        state.update({f"row_state.{name}": self.embedding.states(name)["sum"] for name in self.own_tables})
        dense = get_optimizer_state_dict(self.replicated, self.optimizer, options=_FLAT)
        state.update({f"optimizer.{name}": value for name, value in dense.items()})
        # Order of samples and initial weights are functions of seed and position, so no generator is saved.
        state["position"] = {"step": self.step, "seed": self.config.seed, "batch_size": self.config.batch_size}
        return state

    def restore(self, state: dict[str, Any]) -> None:
        """Takes over what is not the trainer's own memory in a loaded `state`."""
        position = state["position"]
        for name, ours in (("seed", self.config.seed), ("batch_size", self.config.batch_size)):
            if position[name] != ours:
                raise ConfigError(f"the checkpoint has {name} {position[name]}, but this run has {ours}")
        prefix = "optimizer."
        dense = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
        set_optimizer_state_dict(self.replicated, self.optimizer, dense, options=_FLAT)
        self.step = self.embedding.step = int(position["step"])


def gather_rows(part: Tensor) -> Tensor:
    """All ranks' rows in the order of ranks, on every rank; ranks may have different numbers of rows."""
    world_size = dist.get_world_size()
    counts = [torch.zeros(1, dtype=torch.int64) for _ in range(world_size)]
    dist.all_gather(counts, torch.tensor([len(part)]))
    longest = max(int(count) for count in counts)
    padded = F.pad(part, (0, 0, 0, longest - len(part))).contiguous()
    gathered = [torch.empty_like(padded) for _ in range(world_size)]
    dist.all_gather(gathered, padded)
    return torch.cat([piece[: int(count)] for piece, count in zip(gathered, counts, strict=True)])
