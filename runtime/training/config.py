# SPDX-License-Identifier: Apache-2.0
"""Every setting of a training run. The command line fills it, and every rank gets the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Final

import torch

from sennit.offload.ingest.facts import TableFacts
from sennit.offload.ingest.target import IngestTarget
from sennit.options import Option, check
from sennit.runtime.backend.process_group import BACKEND_NAME
from sennit.runtime.data.order import SLICES_MAX, OrderSettings
from sennit.runtime.data.schema import HISTORY_MAX
from sennit.runtime.data.source import Source
from sennit.runtime.kernels.optimizers import NAMED, OptimizerSpec
from sennit.runtime.model.factory import DENSE_OPTIMIZERS, MODELS, reads_histories
from sennit.runtime.model.inputs import ATTENTION_PRECISIONS
from sennit.runtime.model.loss import LOSSES
from sennit.runtime.model.schedule import DECAYS, RateSchedule
from sennit.runtime.model.settings import SettingsFile, tables_of
from sennit.runtime.model.sharding_settings import AUTO, Sharding, sharding_of
from sennit.runtime.model.tensor_train import TensorTrainRule
from sennit.runtime.pipeline.ahead import BATCHES_AHEAD_MAX
from sennit.runtime.sharded.files import TableStore
from sennit.runtime.sharded.placement import SHARDINGS
from sennit.runtime.sharded.tables import MAX_SHARDS, Table
from sennit.runtime.stream.settings import StreamSettings
from sennit.runtime.training.metrics import METRICS
from sennit.transport.codecs import COLLECTIVE_CODECS, EXCHANGE_CODECS, Codec
from sennit.transport.errors import ConfigError
from sennit.transport.sizes import parse_size

OVERLAPS: Final = ("auto", "ids", "tables")


def _in_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{name} {value}; allowed: {low} to {high}")


def _widths(flag: str) -> Option:
    """An option that takes widths of an MLP."""

    def parse(text: str) -> tuple[int, ...]:
        try:
            return tuple(int(part) for part in text.split(",") if part.strip())
        except ValueError:
            raise ConfigError(f"{flag} {text!r}; allowed: widths separated by commas, like 128,64") from None

    return Option(parse=parse, text=lambda widths: ",".join(map(str, widths)))


def _read(name: str) -> SettingsFile:
    return SettingsFile.read(Path(name))


def _auto(_: Sharding) -> str:
    """The command plans by default. A program does not: its default is the same placement on every machine."""
    return AUTO


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingConfig:
    """The options of `sennit train`: those of its fields, and of `Source`, `StreamSettings` and `TableStore`.

    It is checked when it is made. `check_world` checks what depends on the number of ranks.
    """

    source: Source = field(default_factory=Source)
    """The data set."""

    stream: StreamSettings = field(default_factory=StreamSettings)
    """In which order the data set is read."""

    ingest: Annotated[
        IngestTarget | None,
        Option(
            metavar="TARGET",
            parse=IngestTarget.parse,
            help="take samples from feeders: xdp://INTERFACE[,…][:PORT] or cpu://ADDRESS[:PORT]",
        ),
    ] = None
    """Feeders to take samples from: `xdp://INTERFACE[,…][:PORT]` or `cpu://ADDRESS[:PORT]`. None: from `source`."""

    device: Annotated[str, Option(choices=("cpu", "cuda"))] = "cpu"
    """Where model and tables are. Ranks of a host take its GPUs in turn."""

    backend: Annotated[str, Option()] = "sennit"
    """torch.distributed backend. "gloo" is for comparison."""

    exchange: Annotated[str | None, Option(metavar="CODEC", choices=tuple(EXCHANGE_CODECS))] = None
    """Code embeddings and their gradients. With int8 a row is a block. "lossless" also codes ids. None: no codec."""

    gradient: Annotated[str | None, Option(metavar="CODEC", choices=tuple(COLLECTIVE_CODECS))] = None
    """Code dense gradients, with error feedback. None: no codec."""

    seed: Annotated[int, Option(low=0, high=2**63 - 1)] = 1
    """Seed of everything random. That is initial weights, split, order of samples and synthetic data."""

    # `__post_init__` fills it in, so that it is a number for everybody else.
    epochs: Annotated[
        int,
        Option(
            low=1, high=100_000, help="passes over the training samples; default: 2, or 1 with --order time and files"
        ),
    ] = None  # type: ignore[assignment]
    """Passes over the training samples. None: 2, or 1 in order of time or of files."""

    max_steps: Annotated[int | None, Option(flag="--steps", low=1, high=2**40)] = None
    """Stop after this many steps. The learning rate then decays to zero over these. None: all epochs."""

    batch_size: Annotated[int, Option(low=1, high=2**24)] = 2048
    """Samples per step, all ranks together. So the run is the same at any world size."""

    slices: Annotated[int, Option(low=1, high=SLICES_MAX)] = 8
    """Slices of a global batch: a power of two, at least as many as ranks. They belong to the model
    (docs/reference/sharded.md)."""

    model: Annotated[str, Option(help=f"{', '.join(MODELS)}, or package.module:factory")] = "dlrm"
    """A name of `MODELS`, or "package.module:factory" (docs/reference/models.md)."""

    loss: Annotated[str, Option(help=f"{', '.join(LOSSES)} (log loss), or package.module:function")] = "bce"
    """What is minimised: a name of `LOSSES`, or "package.module:function" (docs/reference/models.md)."""

    embedding_dim: Annotated[int, Option(flag="--dim", low=1, high=4096)] = 16
    """Embedding dimension. It is the columns of every table, unless `tables` says otherwise."""

    tables: Annotated[SettingsFile | None, Option(metavar="FILE", parse=_read)] = None
    """Settings of each table (TOML). None: the same for all, from the other fields."""

    row_shards: Annotated[int, Option(low=1, high=MAX_SHARDS)] = 1
    """Row shards of each table; part of the model. `tables` may say otherwise."""

    sharding: Annotated[
        Sharding,
        Option(
            metavar="NAME|FILE",
            help=f"which rank has which rows: auto (planned when the run starts), {', '.join(SHARDINGS)}, or a TOML "
            "file",
            parse=sharding_of,
            text=_auto,
        ),
    ] = field(default_factory=Sharding)
    """Which rank has which shard. It changes no bit."""

    use: Annotated[Path | None, Option(metavar="FILE")] = None
    """Plan with a sketch that an earlier run wrote (--sketch). None: the planner counts the data."""

    rebalance: Annotated[int | None, Option(metavar="STEPS", low=1, high=2**40)] = None
    """Look every STEPS steps whether shards should move; same bits. They move if the use of rows has changed so much
    that it pays. None: never."""

    tensor_train: Annotated[TensorTrainRule | None, Option(metavar="ROWS:RANK", parse=TensorTrainRule.parse)] = None
    """Hold tables of at least ROWS rows as tensor trains of rank RANK. None: those of which `tables` says it
    (docs/reference/embedding.md)."""

    bottom: Annotated[tuple[int, ...], _widths("--bottom")] = (64,)
    """Hidden widths of the bottom MLP."""

    top: Annotated[tuple[int, ...], _widths("--top")] = (128, 64)
    """Hidden widths of the top MLP."""

    history: Annotated[int | None, Option(metavar="EVENTS", low=1, high=HISTORY_MAX)] = None
    """Events of a history at most, for a model that reads histories. None: as the data say."""

    layers: Annotated[int, Option(low=1, high=1024)] = 2
    """Layers of a model that attends to histories."""

    heads: Annotated[int, Option(low=1, high=1024)] = 2
    """Heads of each of these layers. They share the embedding dimension."""

    attention: Annotated[str, Option(choices=tuple(ATTENTION_PRECISIONS))] = "fp32"
    """Precision of the products of attention. Sums are made in fp32. With bf16 a processor with AMX is faster."""

    sparse_rate: Annotated[float, Option(above=0, below=1000)] = 0.15
    """Learning rate of the embeddings."""

    optimizer: Annotated[str, Option(choices=tuple(NAMED))] = "row_wise_adagrad"
    """Optimizer of the embeddings. `tables` may say otherwise, and has its other options."""

    momentum: Annotated[float, Option(low=0, below=1)] = 0.0
    """Momentum of `--optimizer sgd`."""

    dense_rate: Annotated[float, Option(above=0, below=1000)] = 0.02
    """Learning rate of the MLPs."""

    dense_optimizer: Annotated[str, Option(choices=DENSE_OPTIMIZERS)] = "adagrad"
    """Optimizer of the MLPs."""

    decay: Annotated[str, Option(choices=DECAYS)] = "linear"
    """Learning rates over the run. They go to zero, or to `decay_floor`."""

    warmup: Annotated[int, Option(low=0)] = 0
    """Steps during which the learning rates rise."""

    decay_start: Annotated[int | None, Option(low=0)] = None
    """Step at which decay starts; default: after the warm-up."""

    decay_steps: Annotated[int | None, Option(low=1)] = None
    """Steps of the decay; default: to the end."""

    decay_power: Annotated[float, Option(above=0)] = 2.0
    """Power of polynomial decay."""

    decay_floor: Annotated[float, Option(low=0, high=1)] = 0.0
    """Share of the rates that remains after decay."""

    skip_samples: Annotated[int, Option(metavar="N", low=0, high=2**62)] = 0
    """Leave up to N samples out whose loss is not finite, and name them. One more ends the run, as the first does with
    0."""

    clip_value: Annotated[float | None, Option(above=0, below=1e30)] = None
    """Clip each element of a gradient, also of embedding rows. The gradient of a row is the sum over its samples."""

    clip_norm: Annotated[float | None, Option(above=0, below=1e30)] = None
    """Clip the norm of the dense gradient, and of each embedding row's. A longer one is scaled down."""

    weight_decay: Annotated[float | None, Option(low=0, below=1000)] = None
    """L2 weight decay; default: 0, and 0.01 for embeddings with adamw. The weight times this is added to its gradient;
    adamw takes it off the weight. Rows that a step does not look up do not decay."""

    table_store: TableStore | None = None
    """The place of embedding tables larger than memory; None: in memory."""

    rank_memory_bytes: Annotated[
        int | None,
        Option(
            flag="--rank-memory",
            metavar="SIZE",
            parse=parse_size,
            low=1,
            high=2**62,
        ),
    ] = None
    """Memory of each rank for tables; default: its share of the host's. Optimizer states count."""

    split: Annotated[str, Option(choices=("random", "last"))] = "random"
    """Which samples are for evaluation. The last ones are often the latest."""

    eval_fraction: Annotated[float, Option(above=0, below=1)] = 0.1
    """Share of the samples for evaluation. Without a meaning if the data set says itself which ones are."""

    eval_every: Annotated[int | None, Option(metavar="STEPS", low=1, high=2**40)] = None
    """Evaluate every STEPS steps, too. None: after each epoch and at the end."""

    gauc: Annotated[str | None, Option(metavar="COLUMN")] = None
    """Evaluate AUC within the samples of each value of this column, such as a user, too: the mean, weighted by their
    samples."""

    validation_fraction: Annotated[float, Option(low=0, below=1)] = 0.0
    """Share of the other samples that say which evaluation is the best, so that those reported have no part in it. 0:
    those reported say it."""

    warm_start: Annotated[Path | None, Option(metavar="CHECKPOINT")] = None
    """Begin with weights and optimizer states of this checkpoint, on these data. Vocabularies get the new values."""

    checkpoint: Annotated[Path | None, Option()] = None
    """Folder for checkpoints."""

    checkpoint_every: Annotated[int | None, Option(low=1, high=2**40)] = None
    """Steps between checkpoints. None: one at the end."""

    keep: Annotated[int | None, Option(metavar="N", low=1, high=2**31)] = None
    """Newest checkpoints to keep; default: all. Older ones are removed when a newer one is durable."""

    checkpoint_increments: Annotated[int, Option(metavar="N", low=0)] = 0
    """After a whole checkpoint, N with the changed rows alone. 0: all are whole."""

    checkpoint_async: Annotated[bool, Option()] = False
    """Write checkpoints while training goes on. A save then takes memory for a copy of what it writes."""

    stop_early: Annotated[int | None, Option(metavar="N", low=1, high=100_000)] = None
    """End after N evaluations (epochs, without `eval_every`) that were no better; keep the best one in DIR/best. DIR is
    the folder of `checkpoint`."""

    best_by: Annotated[str, Option(choices=tuple(METRICS), help="what is best: ne (normalised entropy) or auc")] = "ne"
    """What makes an evaluation the best: a name of `METRICS`."""

    resume: Annotated[bool, Option()] = False
    """Go on from the latest checkpoint. If there is none, the run starts anew. It must have the same data and
    settings."""

    tensorboard: Annotated[Path | None, Option()] = None
    """Folder for TensorBoard events. Rank 0 writes them."""

    json_path: Annotated[Path | None, Option(flag="--json")] = None
    """Write the report to this file. Rank 0 does."""

    sketch_path: Annotated[Path | None, Option(flag="--sketch")] = None
    """With --ingest: write to this file how often each row was used. Rank 0 does."""

    timeline: Annotated[Path | None, Option(metavar="FILE")] = None
    """Write a timeline of all ranks, for sennit timeline and ui.perfetto.dev. An elastic run has one for each group of
    ranks."""

    batches_ahead: Annotated[int, Option(metavar="N", low=0, high=BATCHES_AHEAD_MAX)] = 1
    """Batches taken, and their ids sent, while one is computed: 0 to 3. It changes no bit."""

    overlap: Annotated[str, Option(metavar="WHAT", choices=OVERLAPS)] = "auto"
    """What travels while a batch is computed. Input and ids alone; lookups and updates of tables, with their exchanges,
    as well; auto: by what the run is. It changes no bit."""

    timeout_s: Annotated[float, Option(flag="--timeout", above=0, high=86_400)] = 300.0
    """Deadline of a collective, seconds. Finding the other ranks has the same."""

    elastic: Annotated[bool, Option()] = False
    """Go on when ranks die or join. After a death, survivors continue from the last checkpoint, or from the start if
    there is none. Ranks that join are taken in at the next step."""

    min_ranks: Annotated[int, Option(low=1, high=4096)] = 1
    """Elastic: fewest ranks to go on with."""

    def __post_init__(self) -> None:
        check(self)
        if self.epochs is None:
            object.__setattr__(self, "epochs", 2 if self.stream.order == "shuffled" else 1)
        if self.slices & (self.slices - 1):
            raise ConfigError(f"--slices {self.slices}; allowed: powers of two, 1 to {SLICES_MAX:,}")
        if self.batch_size < self.slices:
            raise ConfigError(
                f"--batch-size {self.batch_size}; allowed: {self.slices} or more, a sample for each of --slices"
            )
        for name, widths in (("--bottom", self.bottom), ("--top", self.top)):
            for width in widths:
                _in_range(f"{name} with a width of", width, 1, 65_536)
        self.schedule(self.max_steps or 2**40)
        self._optimizer()
        if self.device != "cpu":
            if self.backend != BACKEND_NAME:
                raise ConfigError(f"--device {self.device} over {self.backend!r}; allowed: {BACKEND_NAME!r}")
            if self.skip_samples:
                raise ConfigError(
                    f"--skip-samples with --device {self.device}, where no step waits for its loss; allowed: cpu"
                )
            if not torch.cuda.is_available():
                raise ConfigError(f"--device {self.device}, but torch finds no GPU here; allowed: cpu")
        for name, codec in (("exchange", self.exchange), ("gradient", self.gradient)):
            if codec is not None and self.backend != BACKEND_NAME:
                raise ConfigError(f"--{name} {codec} over {self.backend!r}; allowed: {BACKEND_NAME!r}")
        if self.elastic and self.backend != BACKEND_NAME:
            raise ConfigError(f"--elastic over {self.backend!r}; allowed: {BACKEND_NAME!r}")
        if self.sketch_path is not None and self.ingest is None:
            raise ConfigError("--sketch without --ingest; allowed: with it (it counts what feeders send)")
        if self.gauc is not None and self.ingest is not None:
            raise ConfigError("--gauc with --ingest; allowed: with data that ranks read themselves")
        if self.warm_start is not None and self.ingest is not None:
            raise ConfigError("--warm-start with --ingest; allowed: with data that ranks read themselves")
        self._check_stream(self.stream)
        if self.rebalance is not None:
            self._check_rebalance()
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

    def _check_stream(self, stream: StreamSettings) -> None:
        if stream.window_s is not None and self.stop_early is not None:
            raise ConfigError("--stop-early with --window, whose evaluations are of different samples")
        if stream.order == "time" and self.epochs != 1:
            raise ConfigError(f"--epochs {self.epochs} with --order time; allowed: 1")
        if stream.follow is None:
            return
        if self.epochs != 1:
            raise ConfigError(f"--epochs {self.epochs} with --follow; allowed: 1")
        if self.decay != "none" and self.decay_steps is None and self.max_steps is None:
            raise ConfigError(
                f"--decay {self.decay} with --follow, whose last step is not known; allowed: with --decay-steps or "
                "--steps, or --decay none"
            )
        others = {
            "elastic": self.elastic, "ingest": self.ingest is not None, "rebalance": self.rebalance is not None,
        }  # fmt: skip
        for option, is_given in others.items():
            if is_given:
                raise ConfigError(f"--{option} with --follow; allowed: one of the two")

    def _check_rebalance(self) -> None:
        if not self.sharding.is_planned:
            raise ConfigError("--rebalance with a placement that is given; allowed: with --sharding auto")
        if self.device != "cpu":
            raise ConfigError(f"--rebalance with --device {self.device}, whose kernels nobody measures; allowed: cpu")

    def tables_of(self, facts: Sequence[TableFacts]) -> tuple[Table, ...]:
        """The tables of the model, one for each column of ids. Raises `ConfigError` if `tables` is of other data, or
        asks feeders for ids that they do not send.
        """
        if self.ingest is not None and self.tables is not None:
            _check_sent(facts, self.tables)
        optimizer = self._optimizer()
        template = Table(
            name="template",
            rows=1,
            dim=self.embedding_dim,
            optimizer=optimizer,
            row_shards=self.row_shards,
            pooling="none" if reads_histories(self.model) else "sum",
        )
        found = tables_of(facts, self.tables, template)
        return found if self.tensor_train is None else self.tensor_train.applied(found)

    def _optimizer(self) -> OptimizerSpec:
        """The optimizer of tables of which `tables` says nothing."""
        options: dict[str, Any] = {} if self.weight_decay is None else {"weight_decay": self.weight_decay}
        limits = {"max_gradient": self.clip_value, "max_gradient_norm": self.clip_norm}
        return OptimizerSpec.named(self.optimizer, momentum=self.momentum, **limits, **options)

    @property
    def exchange_codec(self) -> Codec | None:
        """The codec of `exchange`."""
        return None if self.exchange is None else Codec(kind=EXCHANGE_CODECS[self.exchange])

    @property
    def gradient_codec(self) -> Codec | None:
        """The codec of `gradient`."""
        return None if self.gradient is None else Codec(kind=COLLECTIVE_CODECS[self.gradient])

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


def _check_sent(facts: Sequence[TableFacts], asked: SettingsFile) -> None:
    """Raises `ConfigError` for a table that is to have dynamic ids, of which feeders send numbers of rows."""
    for fact in facts:
        if asked.option(fact.name, "ids") is not None and not fact.is_dynamic:
            raise ConfigError(
                f"{asked.source}: table {fact.name} with dynamic ids, but the feeder sends numbers of rows; "
                'allowed: with encode = "dynamic" in the schema of the feeder'
            )
