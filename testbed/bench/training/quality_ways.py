# SPDX-License-Identifier: Apache-2.0
"""The ways to train that `sennit bench quality` compares, and how one of them is run.

Large batches get the usual rate rules: rates grow with the batch size (Goyal et al. 2017), with its square root
(Krizhevsky 2014), or not at all, and rise in the first steps (warm-up).
"""

from __future__ import annotations

import contextlib
import functools
import io
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from sennit.runtime.backend.torch_versions import Store
from sennit.runtime.data import sources
from sennit.runtime.data.source import Source
from sennit.runtime.kernels.spec import Precision, Rounding
from sennit.runtime.model.factory import reads_histories
from sennit.runtime.model.settings import SettingsFile
from sennit.runtime.planner.one_thread import one_thread
from sennit.runtime.stream.settings import StreamSettings
from sennit.runtime.training import launch
from sennit.runtime.training.config import TrainingConfig
from sennit.runtime.training.run import Place, run_rank
from sennit.testbed.bench.training import parameter_server, plain_torch
from sennit.testbed.bench.training.padded_hstu import PaddedTorch
from sennit.testbed.bench.training.plain_torch import PlainTorch
from sennit.transport.errors import SennitError

FP32: Final = "fp32"
PLAIN: Final = "plain torch"
ASYNCHRONOUS: Final = "parameter server"
# Batch size and workers of the asynchronous way. Its batches are small, as users of parameter servers take them.
ASYNCHRONOUS_BATCH, WORKERS = 256, 4
SAME_TIME: Final = ", same time"
SQRT: Final = "sqrt"
RATE_RULES: Final[Mapping[str, float]] = {SQRT: 0.5, "linear": 1.0, "fixed": 0.0}
"""Rate rules by name: the power of the batch size that rates grow with."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to train."""

    name: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `TrainingConfig`, beside the batch size and its rates."""

    batch_size: int | None = None
    """Samples of a global batch; None: the default."""

    rule: str = SQRT
    """How rates follow `batch_size`: a name of `RATE_RULES`."""

    is_program: bool = False
    """Whether another program trains: plain torch, or the parameter server."""

    is_same_time: bool = False
    """Whether it trains for as long as the parameter server of `rule` took."""

    @property
    def reads_histories(self) -> bool:
        return "model" in self.changes and reads_histories(self.changes["model"])

    def config(self, job: Job, steps: int | None = None) -> TrainingConfig:
        """The configuration of a run of this way; `steps`: how many, or as `job` says."""
        config = TrainingConfig(
            source=Source(data=job.data), seed=job.seed, epochs=job.epochs, history=job.history, **self.changes
        )
        if self.batch_size is None:
            return config
        factor = (self.batch_size / config.batch_size) ** RATE_RULES[self.rule]
        sparse, dense = config.sparse_rate * factor, config.dense_rate * factor
        config = replace(config, batch_size=self.batch_size, sparse_rate=sparse, dense_rate=dense)
        of_epoch = steps_per_epoch(config, _sample_count(job.data))
        if steps is not None:
            config = replace(config, max_steps=steps, epochs=-(-steps // of_epoch))
        return replace(config, warmup=round(job.warmup * (steps or of_epoch * config.epochs)))


def steps_per_epoch(config: TrainingConfig, samples: int) -> int:
    """The steps of an epoch over these samples, some of which are for evaluation."""
    return (samples - round(samples * config.eval_fraction)) // config.batch_size


def _stored_as(precision: Precision) -> dict[str, Any]:
    """All tables in 16 bits, with stochastic rounding."""
    defaults = {"precision": precision, "rounding": Rounding.STOCHASTIC}
    return {"tables": SettingsFile(source=precision.name, defaults=defaults, tables={})}


PROGRAMS: Final = (
    Way(name=PLAIN, is_program=True),
    Way(name=ASYNCHRONOUS, is_program=True, batch_size=ASYNCHRONOUS_BATCH),
)
WAYS: Final[Mapping[str, Way]] = {
    way.name: way
    for way in (
        Way(name=FP32),
        *PROGRAMS,
        Way(name="exchange bf16", changes={"exchange": "bf16"}),
        Way(name="exchange fp8", changes={"exchange": "fp8"}),
        Way(name="exchange int8", changes={"exchange": "int8"}),
        Way(name="exchange and gradient int8", changes={"exchange": "int8", "gradient": "int8"}),
        Way(name="tables fp16", changes=_stored_as(Precision.FP16)),
        Way(name="tables bf16", changes=_stored_as(Precision.BF16)),
    )
}


IN_TIME: Final[Mapping[str, Any]] = {"stream": StreamSettings(order="time"), "batch_size": 256, "decay": "none"}
WITH_ADAM: Final[Mapping[str, Any]] = {"model": "hstu", "dense_optimizer": "adam", "dense_rate": 0.002}
DLRM, HSTU, PADDED = "dlrm in time order", "hstu in time order", "hstu in padded torch"
HISTORY_WAYS: Final[Mapping[str, Way]] = {
    way.name: way
    for way in (
        Way(name=DLRM, changes=IN_TIME),
        Way(name=HSTU, changes={**IN_TIME, **WITH_ADAM}),
        Way(name=PADDED, changes={**IN_TIME, **WITH_ADAM}, is_program=True),
    )
}
"""Ways of one pass in the order of time, for data with histories. The last samples are for evaluation."""


def with_rule(name: str, rule: str) -> str:
    """The name of a way with this rate rule."""
    return name if rule == SQRT else f"{name}, {rule}"


def batch_way(size: int, rule: str = SQRT, *, is_same_time: bool = False) -> Way:
    """Synchronous training with this batch size."""
    name = with_rule(f"batch {size:,}", rule) + (SAME_TIME if is_same_time else "")
    return Way(name=name, batch_size=size, rule=rule, is_same_time=is_same_time)


def server_way(rule: str) -> Way:
    return replace(WAYS[ASYNCHRONOUS], name=with_rule(ASYNCHRONOUS, rule), rule=rule)


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is equal in all ways of one comparison."""

    data: str
    seed: int
    epochs: int
    ranks: int
    warmup: float
    """The share of the steps in which rates rise, of ways with a batch size of their own."""

    history: int | None = None
    """Events of a history at most; None: as the data say."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """One run."""

    quality: dict[str, float]
    steps: int | None = None
    seconds: float | None = None
    """Seconds of training, without loading data and evaluation; None: not measured."""


def steps_within(limit_s: float, like: Trained) -> int:
    """How many steps fit into `limit_s`, at the pace of the run `like`: at least 1.

    Each way is evaluated once, after its last step and outside its clock. So no way can choose among evaluations, and
    none trains on until the next one. Steps are rounded down: what does not fit is not trained.
    """
    assert like.steps
    assert like.seconds
    return max(1, math.floor(limit_s * like.steps / like.seconds))


def train(job: Job, way: Way, steps: int | None = None) -> Trained:
    """Trains, for all epochs or so many steps. Raises `SennitError` for a run that fails."""
    try:
        config = way.config(job, steps)
        if not way.is_program:
            return _ours(config, job.ranks)
        if way.name in (PLAIN, PADDED):
            plain = PlainTorch if way.name == PLAIN else PaddedTorch
            with one_thread():
                return Trained(quality=asdict(plain_torch.train(plain(config))))
        outcome = parameter_server.train(config, WORKERS)
    except SennitError as error:
        raise SennitError(f"{way.name}, seed {job.seed}: {error}") from error
    return Trained(quality=asdict(outcome.quality), steps=outcome.steps, seconds=outcome.seconds)


def _ours(config: TrainingConfig, ranks: int) -> Trained:
    """Runs `sennit train` in ranks of its own."""
    trained: Trained = launch.run_ranks(_rank, config, ranks, timeout_s=config.timeout_s)[0]
    return trained


def _rank(config: TrainingConfig, rank: int, world_size: int, store: Store) -> Trained:
    # What a run prints is for people who run one.
    with contextlib.redirect_stdout(io.StringIO()):
        report = run_rank(config, Place(rank=rank, world_size=world_size, store=store))
    return Trained(quality=asdict(report.quality), steps=report.step, seconds=report.train_s)


@functools.lru_cache
def _sample_count(data: str) -> int:
    """Samples of a named data set. The seed does not change them."""
    return len(sources.load(Source(data=data), seed=1))
