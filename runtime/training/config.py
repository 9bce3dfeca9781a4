# SPDX-License-Identifier: Apache-2.0
"""Every setting of a training run. The command line fills it, and every rank gets the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Final

import torch

from sennit.offload.ingest.facts import TableFacts
from sennit.offload.ingest.target import IngestTarget
from sennit.runtime.backend.process_group import BACKEND_NAME
from sennit.runtime.data.order import SLICES_MAX, OrderSettings
from sennit.runtime.data.sources import Source
from sennit.runtime.kernels.optimizers import Optimizer, OptimizerSpec
from sennit.runtime.model.factory import DENSE_OPTIMIZERS
from sennit.runtime.model.schedule import RateSchedule
from sennit.runtime.model.settings import SettingsFile, tables_of
from sennit.runtime.model.sharding_settings import Sharding
from sennit.runtime.model.tensor_train import TensorTrainRule
from sennit.runtime.pipeline.ahead import BATCHES_AHEAD_MAX
from sennit.runtime.sharded.files import TableStore
from sennit.runtime.sharded.tables import MAX_SHARDS, Table
from sennit.runtime.training.metrics import METRICS
from sennit.transport.codecs import COLLECTIVE_CODECS, EXCHANGE_CODECS, Codec
from sennit.transport.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingConfig:
    """Checked when it is made. `check_world` checks what depends on the number of ranks."""

    source: Source = field(default_factory=Source)
    """The data set."""

    ingest: IngestTarget | None = None
    """Where feeders send samples to; None: samples are read from `source`."""

    split: str = "random"
    """How evaluation rows are chosen: "random", or "last" for the end of the data set (often the latest samples)."""

    eval_fraction: float = 0.1
    """The share of samples held back for evaluation."""

    seed: int = 1
    """Controls initial weights, split, order of samples and synthetic data."""

    epochs: int = 2
    """Passes over the training rows."""

    max_steps: int | None = None
    """Stop after this many steps; the learning rate then decays to zero over these. None: all epochs."""

    batch_size: int = 2048
    """Samples per step over all ranks together, so that the run is the same at any world size."""

    slices: int = 8
    """Slices of the global batch, a power of two. They belong to the model (docs/reference/sharded.md)."""

    model: str = "dlrm"
    """A name of `MODELS`, or "package.module:factory" (docs/reference/models.md)."""

    bottom: tuple[int, ...] = (64,)
    """Hidden widths of the bottom MLP."""

    top: tuple[int, ...] = (128, 64)
    """Hidden widths of the top MLP."""

    embedding_dim: int = 16
    """Columns of every table, unless `tables` says otherwise."""

    row_shards: int = 1
    """Row shards of every table, unless `tables` says otherwise. They belong to the model."""

    tables: SettingsFile | None = None
    """Settings of each table; None: the same for all, from the fields above and below."""

    tensor_train: TensorTrainRule | None = None
    """Which tables are tensor trains (docs/reference/embedding.md); None: those of which `tables` says it."""

    sharding: Sharding = field(default_factory=Sharding)
    """Which rank has which shard. It changes no bit."""

    sparse_rate: float = 0.15
    """Learning rate of the embeddings (row-wise AdaGrad)."""

    dense_rate: float = 0.02
    """Learning rate of the MLPs."""

    dense_optimizer: str = "adagrad"
    """adagrad, adam or sgd."""

    decay: str = "linear"
    """Decay of both rates over the run: "linear" or "polynomial" to zero, or "none"."""

    warmup: int = 0
    """Steps of the warm-up, in which both rates rise to their full values."""

    decay_start: int | None = None
    """Steps before decay begins; None: as many as the warm-up has."""

    decay_steps: int | None = None
    """Steps of the decay; None: to the end of the run."""

    decay_power: float = 2.0
    """The power of polynomial decay."""

    decay_floor: float = 0.0
    """The share of the rates that remains at the end of decay and after it."""

    clip_value: float | None = None
    """Each element of a gradient is clipped to plus and minus this: of dense weights, and of each row's sum."""

    clip_norm: float | None = None
    """The whole dense gradient is scaled down to this norm if it is longer. So is the gradient of each row."""

    weight_decay: float = 0.0
    """The weight times this is added to its gradient (L2). Rows that a step does not look up do not decay."""

    table_store: TableStore | None = None
    """The place of embedding tables larger than memory; None: in memory."""

    rank_memory_bytes: int | None = None
    """Memory of each rank for tables with their optimizer states; None: its share of what the host has available."""

    device: str = "cpu"
    """Where model and tables are: "cpu" or "cuda". Ranks of a host take its GPUs in turn."""

    backend: str = "sennit"
    """The torch.distributed backend; "gloo" for comparison."""

    exchange: str | None = None
    """The codec of pooled embeddings and of their gradients between ranks: a name of `EXCHANGE_CODECS`; None: none.
    With int8 a row is a block. "lossless" also codes ids."""

    gradient: str | None = None
    """The codec of dense gradients between ranks, a name of `COLLECTIVE_CODECS`, with error feedback; None: none."""

    rebalance: int | None = None
    """Every so many steps, shards move if the use of rows has changed so much that it pays; None: never. It changes no
    bit."""

    use: Path | None = None
    """A sketch of how often rows are used, which an earlier run wrote, for the planner; None: it counts the data."""

    batches_ahead: int = 1
    """How many batches are taken, and their ids sent, while one is computed; 0: none. It changes no bit."""

    overlap: str = "auto"
    """What overlaps if batches are sent ahead, of `OVERLAPS`. It changes no bit."""

    timeout_s: float = 300.0
    """The deadline in seconds of each collective, and of finding the other ranks."""

    checkpoint: Path | None = None
    """The folder for checkpoints."""

    checkpoint_every: int | None = None
    """Steps between checkpoints; None: one at the end."""

    stop_early: int | None = None
    """End after so many epochs that were no better than the best one, whose checkpoint is kept; None: at the end."""

    best_by: str = "ne"
    """What makes an evaluation the best: "auc", or "ne", normalised entropy."""

    keep: int | None = None
    """How many checkpoints of the run to keep. Older ones are removed when a newer one is durable. None: all."""

    checkpoint_increments: int = 0
    """So many checkpoints after a whole one hold only the rows that changed; 0: all are whole."""

    checkpoint_async: bool = False
    """Write checkpoints while training goes on. A save then takes memory for a copy of what it writes."""

    resume: bool = False
    """Resume from the newest checkpoint, if there is one. It must have the same data and settings."""

    elastic: bool = False
    """Whether ranks may leave and join.

    When a rank dies, the others go on without it from the last checkpoint (or from the start if there is none). Ranks
    that join are taken in at the next step.
    """

    min_ranks: int = 1
    """An elastic run with fewer ranks left fails."""

    tensorboard: Path | None = None
    """The folder for TensorBoard events, written by rank 0."""

    json_path: Path | None = None
    """The file for the report, written by rank 0."""

    sketch_path: Path | None = None
    """The file for the sketch of the ids that feeders sent, written by rank 0."""

    timeline: Path | None = None
    """The file for the timeline of all ranks, written by rank 0. An elastic run has one for each group of ranks."""

    def __post_init__(self) -> None:
        _in_range("seed", self.seed, 0, 2**63 - 1)
        _in_range("epochs", self.epochs, 1, 100_000)
        _in_range("batch size", self.batch_size, 1, 2**24)
        _in_range("slices", self.slices, 1, SLICES_MAX)
        if self.slices & (self.slices - 1):
            raise ConfigError(f"slices {self.slices}; allowed: powers of two, 1 to {SLICES_MAX:,}")
        if self.batch_size < self.slices:
            raise ConfigError(f"batch size {self.batch_size} for {self.slices} slices; allowed: a sample for each")
        _in_range("row shards", self.row_shards, 1, MAX_SHARDS)
        _in_range("embedding dimension", self.embedding_dim, 1, 4096)
        for name, widths in (("bottom", self.bottom), ("top", self.top)):
            for width in widths:
                _in_range(f"width in the {name} MLP", width, 1, 65_536)
        for name, steps in (("steps", self.max_steps), ("checkpoint interval", self.checkpoint_every)):
            if steps is not None:
                _in_range(name, steps, 1, 2**40)
        for name, rate in (("sparse rate", self.sparse_rate), ("dense rate", self.dense_rate)):
            if not 0 < rate < 1000:
                raise ConfigError(f"{name} {rate}; allowed: above 0, below 1000")
        _in_range("batches ahead", self.batches_ahead, 0, BATCHES_AHEAD_MAX)
        _one_of("overlap", self.overlap, OVERLAPS)
        if not 0 < self.timeout_s <= 86_400:
            raise ConfigError(f"timeout {self.timeout_s} s; allowed: above 0, at most 86,400")
        _one_of("split", self.split, ("random", "last"))
        self.schedule(self.max_steps or 2**40)
        for name, most in (("clip value", self.clip_value), ("clip norm", self.clip_norm)):
            if most is not None and not 0 < most < 1e30:
                raise ConfigError(f"{name} {most}; allowed: above 0, below 1e30")
        if not 0 <= self.weight_decay < 1000:
            raise ConfigError(f"weight decay {self.weight_decay}; allowed: 0 or more, below 1000")
        _one_of("device", self.device, ("cpu", "cuda"))
        if self.device != "cpu":
            if self.backend != BACKEND_NAME:
                raise ConfigError(f"--device {self.device} over {self.backend!r}; allowed: {BACKEND_NAME!r}")
            if not torch.cuda.is_available():
                raise ConfigError(f"--device {self.device}, but torch finds no GPU here; allowed: cpu")
        _one_of("dense optimizer", self.dense_optimizer, DENSE_OPTIMIZERS)
        for name, codec, allowed in (
            ("exchange", self.exchange, EXCHANGE_CODECS),
            ("gradient", self.gradient, COLLECTIVE_CODECS),
        ):
            if codec is None:
                continue
            _one_of(name, codec, tuple(allowed))
            if self.backend != BACKEND_NAME:
                raise ConfigError(f"--{name} {codec} over {self.backend!r}; allowed: {BACKEND_NAME!r}")
        if not 0 < self.eval_fraction < 1:
            raise ConfigError(f"evaluation part {self.eval_fraction}; allowed: between 0 and 1")
        if self.rank_memory_bytes is not None:
            _in_range("bytes of memory of a rank", self.rank_memory_bytes, 1, 2**62)
        _in_range("least number of ranks", self.min_ranks, 1, 4096)
        if self.elastic and self.backend != BACKEND_NAME:
            raise ConfigError(f"--elastic over {self.backend!r}; allowed: {BACKEND_NAME!r}")
        if self.sketch_path is not None and self.ingest is None:
            raise ConfigError("--sketch without --ingest; allowed: with it (it counts what feeders send)")
        if self.rebalance is not None:
            self._check_rebalance(self.rebalance)
        if self.stop_early is not None:
            _in_range("epochs without a better one", self.stop_early, 1, 100_000)
        _one_of("best by", self.best_by, tuple(METRICS))
        if self.keep is not None:
            _in_range("checkpoints to keep", self.keep, 1, 2**31)
        if self.checkpoint is None:
            for option in (
                "resume",
                "checkpoint_every",
                "keep",
                "checkpoint_increments",
                "checkpoint_async",
                "stop_early",
            ):
                if getattr(self, option) not in (None, False):
                    raise ConfigError(f"--{option.replace('_', '-')} needs a checkpoint folder (--checkpoint DIR)")

    def _check_rebalance(self, steps: int) -> None:
        _in_range("steps between two looks (--rebalance)", steps, 1, 2**40)
        if not self.sharding.is_planned:
            raise ConfigError("--rebalance with a placement that is given; allowed: with --sharding auto")
        if self.device != "cpu":
            raise ConfigError(f"--rebalance with --device {self.device}, whose kernels nobody measures; allowed: cpu")

    def tables_of(self, facts: Sequence[TableFacts]) -> tuple[Table, ...]:
        """The tables of the model, one for each column of ids. Raises `ConfigError` if `tables` is of other data."""
        optimizer = OptimizerSpec(
            kind=Optimizer.ROW_WISE_ADAGRAD,
            epsilon=1e-8,
            weight_decay=self.weight_decay,
            max_gradient=self.clip_value,
            max_gradient_norm=self.clip_norm,
        )
        template = Table(
            name="template", rows=1, dim=self.embedding_dim, optimizer=optimizer, row_shards=self.row_shards
        )
        found = tables_of(facts, self.tables, template)
        return found if self.tensor_train is None else self.tensor_train.applied(found)

    @property
    def exchange_codec(self) -> Codec | None:
        """The codec of `exchange`."""
        return None if self.exchange is None else Codec(kind=EXCHANGE_CODECS[self.exchange])

    def schedule(self, step_count: int) -> RateSchedule:
        """The schedule of the learning rates for a run of `step_count` steps."""
        start = self.warmup if self.decay_start is None else self.decay_start
        return RateSchedule(
            decay=self.decay,
            warmup_steps=self.warmup,
            decay_start=start,
            decay_end=step_count if self.decay_steps is None else start + self.decay_steps,
            power=self.decay_power,
            floor=self.decay_floor,
        )

    @property
    def order_settings(self) -> OrderSettings:
        return OrderSettings(**{one.name: getattr(self, one.name) for one in fields(OrderSettings)})

    def check_world(self, world_size: int) -> None:
        """Raises unless every rank gets a slice of the global batch and a sample."""
        _in_range("number of ranks", world_size, self.min_ranks if self.elastic else 1, min(4096, self.batch_size))
        if world_size == 1 and self.rebalance is not None and not self.elastic:
            raise ConfigError("--rebalance with one rank, which has all shards; allowed: 2 ranks or more, or --elastic")
        if world_size > self.slices:
            raise ConfigError(
                f"number of ranks {world_size}; allowed: at most {self.slices}, the slices of a global batch (--slices)"
            )


OVERLAPS: Final = ("auto", "ids", "tables")
"""Input and ids alone; lookups and updates of tables, with their exchanges, as well; auto: by what the run is."""


def _in_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{name} {value}; allowed: {low} to {high}")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} {value!r}; allowed: {', '.join(allowed)}")
