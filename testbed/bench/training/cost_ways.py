# SPDX-License-Identifier: Apache-2.0
"""The ranks of `sennit bench cost`: each way to train has ranks, feeders and a network of its own, and takes turns.

A turn is a few steps. Its cost is the processor time that all processes of the way took meanwhile, feeders among them,
until the feeders have filled the ranks' slots again. So each turn pays for as many batches as it takes.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from sennit.offload.ingest.target import STATISTICS, IngestTarget
from sennit.runtime.backend.process_group import BACKEND_NAME, communicator
from sennit.runtime.backend.torch_versions import PrefixStore, Store
from sennit.runtime.data.batch_source import BatchSource
from sennit.runtime.ingest.fed import Door, FedSource
from sennit.runtime.memory.large_buffers import keep_large_buffers
from sennit.runtime.model.factory import build
from sennit.runtime.sharded import Features
from sennit.runtime.telemetry.process_cost import SENT, CostMeter, process_ns
from sennit.runtime.training.config import TrainingConfig
from sennit.runtime.training.planned import model_inputs
from sennit.runtime.training.streamed import sources_of
from sennit.runtime.training.trainer import Trainer
from sennit.testbed.bench.samples.python_receiver import PythonTarget
from sennit.testbed.bench.training.plain_torch import BareStep
from sennit.testbed.bench.training.sharded_torchrec import torchrec_step
from sennit.testbed.bench.training.turns import joined
from sennit.testbed.topology.namespace import enter
from sennit.transport.errors import ConfigError, Unsupported

TIMEOUT_S: Final = 120.0
# Feeders fill four slots in this time, and threads that wait fall asleep.
SETTLE_S: Final = 0.08
WARM_TURNS: Final = 2


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to train."""

    name: str
    backend: str
    """sennit or gloo."""

    ingest: str = "memory"
    """xdp, cpu or python: records of a feeder. memory: samples in memory."""

    is_bare: bool = False
    """Ingest and exchange alone (`BareStep`)."""

    is_torchrec: bool = False

    @property
    def is_fed(self) -> bool:
        return self.ingest != "memory"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the ranks of a way are."""

    network: str | None
    """Their network namespace; None: that of the parent."""

    address: str
    interface: str
    feeder: int | None
    """The process of its feeder."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What all ranks are told."""

    ways: tuple[Way, ...]
    places: tuple[Place, ...]
    config: TrainingConfig
    ranks: int
    """Ranks of each way."""

    steps: int
    rounds: int
    port: int


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A way's turns."""

    processor_s: list[float]
    """Processor seconds of all its processes, by turn."""

    feeder_s: list[float]
    """The feeders' part of `processor_s`, by turn."""

    roles_s: list[dict[str, float]]
    """Processor seconds of the ranks by role, for each turn."""

    samples: int
    """Samples of a turn."""

    moved_bytes: int
    """Bytes that ranks sent one another in a turn; 0: nobody counted."""

    absent: str = ""
    """Why it did not run."""


def take_turns(plan: Plan, rank: int, world: int, store: Store) -> Measured | None:
    """A rank of one of the ways; its rank 0 returns the figures. Ways take their turns one after the other, in a
    changing order.
    """
    number, own = divmod(rank, plan.ranks)
    way, place = plan.ways[number], plan.places[number]
    # The trainer does the same.
    keep_large_buffers()
    if place.network is not None:
        enter(place.network)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ[STATISTICS] = "1"
    members = PrefixStore(f"way{number}", store)
    turns = [turn for turn, one in enumerate(turn_order(len(plan.ways), WARM_TURNS + plan.rounds)) if one == number]
    group = joined(own, plan.ranks, members, timeout_s=TIMEOUT_S, backend=way.backend)
    with group, contextlib.ExitStack() as stack:
        try:
            source = _source(plan, way, place, stack)
            steps = _steps(plan, way, source, stack)
        except Unsupported as missing:
            for turn in turns:
                _pass_on(plan, store, turn, own)
            found = _nothing(str(missing)) if own == 0 else None
        else:
            found = _measure(plan, way, place, steps, source, turns, store, own)
        # Nobody closes a network while others measure: there is no turn of this number.
        _wait_for(plan, store, len(plan.ways) * (WARM_TURNS + plan.rounds))
        dist.barrier()
    return found


def turn_order(ways: int, rounds: int) -> list[int]:
    """The way of each turn. In each round another one begins."""
    return [(place + turn) % ways for turn in range(rounds) for place in range(ways)]


def _wait_for(plan: Plan, store: Store, turn: int) -> None:
    if turn:
        store.wait([f"turn{turn}"], timedelta(seconds=TIMEOUT_S * len(plan.ways) * 4))


def _end(store: Store, turn: int, own: int) -> None:
    if own == 0:
        store.set(f"turn{turn + 1}", "")


def _pass_on(plan: Plan, store: Store, turn: int, own: int) -> None:
    """Waits for a turn, and lets it go by."""
    _wait_for(plan, store, turn)
    _end(store, turn, own)


def _nothing(why: str) -> Measured:
    return Measured(processor_s=[], feeder_s=[], roles_s=[], samples=0, moved_bytes=0, absent=why)


def _source(plan: Plan, way: Way, place: Place, stack: contextlib.ExitStack) -> BatchSource:
    config = plan.config
    rank, world = dist.get_rank(), dist.get_world_size()
    source: BatchSource
    if not way.is_fed:
        source = sources_of(config)()
    else:
        make = PythonTarget if way.ingest == "python" else IngestTarget
        kind, where = ("xdp", place.interface) if way.ingest == "xdp" else ("cpu", place.address)
        door = stack.enter_context(Door(make(kind=kind, places=(where,), port=plan.port), rank))
        source = FedSource(
            door,
            config.order_settings,
            config.stream,
            rank=rank,
            world_size=world,
            timeout_s=TIMEOUT_S,
            is_elastic=False,
        )
    stack.callback(source.close)
    needed = (WARM_TURNS + plan.rounds) * plan.steps
    if needed >= source.order.steps_per_epoch:
        raise ConfigError(
            f"{needed} steps in all, but an epoch of {config.source.data} has {source.order.steps_per_epoch}; "
            "allowed: fewer rounds or steps, or smaller batches"
        )
    return source


def _steps(plan: Plan, way: Way, source: BatchSource, stack: contextlib.ExitStack) -> Callable[[], object]:
    """Takes a step of this way."""
    config = plan.config
    if way.is_torchrec:
        return _torchrec(config, source)
    if not way.is_bare:
        trainer = stack.enter_context(Trainer(config, source))
        source.begin(0)
        return trainer.train_step
    source.begin(0)
    inputs = model_inputs(config, source, config.tables_of(source.tables))
    dense = sum(parameter.numel() for parameter in build(config.model, inputs).parameters())
    return BareStep(source, dim=config.embedding_dim, dense_numbers=dense).step


class _WithLoss(nn.Module):
    """The model of the trainer, as TorchRec's step calls it."""

    def __init__(self, model: nn.Module, tables: list[str]) -> None:
        super().__init__()
        self.model, self._tables = model, tables

    def forward(self, dense: Tensor, labels: Tensor, *vectors: Tensor) -> Tensor:
        logits = self.model(dense, dict(zip(self._tables, vectors, strict=True)))
        return F.binary_cross_entropy_with_logits(logits, labels)


def _torchrec(config: TrainingConfig, source: BatchSource) -> Callable[[], object]:
    tables = config.tables_of(source.tables)
    model = build(config.model, model_inputs(config, source, tables))
    step = torchrec_step(tables, _WithLoss(model, [table.name for table in tables]), rate=config.sparse_rate)
    numbers = iter(range(source.order.steps_per_epoch))

    def take() -> None:
        number = next(numbers)
        batch = source.take(number)
        step(batch.dense, Features(lengths=batch.lengths, values=batch.values), batch.labels)
        source.release(number)

    return take


def _measure(
    plan: Plan, way: Way, place: Place, step: Callable[[], object], source: BatchSource, turns: list[int],
    store: Store, own: int,
) -> Measured | None:  # fmt: skip
    processes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(processes, os.getpid())
    seconds: list[float] = []
    fed: list[float] = []
    roles: list[dict[str, float]] = []
    moved = 0
    for turn in turns:
        _wait_for(plan, store, turn)
        feeders = [] if place.feeder is None else _family(place.feeder)
        dist.barrier()
        time.sleep(SETTLE_S)
        with CostMeter(program_ns=source.program_ns) as meter:
            sent_before = _sent_bytes(way)
            before_s, fed_before_s = _spent_s(processes), _spent_s(feeders)
            for _ in range(plan.steps):
                step()
            time.sleep(SETTLE_S)
            ranks_s, feeders_s = _spent_s(processes) - before_s, _spent_s(feeders) - fed_before_s
            moved = _sent_bytes(way) - sent_before
            roles.append(dict(meter.read().roles_s))
        seconds.append(ranks_s + feeders_s)
        fed.append(feeders_s)
        dist.barrier()
        _end(store, turn, own)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (roles, moved))
    if own:
        return None
    summed = [
        {role: sum(one[0][turn].get(role, 0.0) for one in gathered) for role in roles[turn]}
        for turn in range(WARM_TURNS, len(turns))
    ]
    return Measured(
        processor_s=seconds[WARM_TURNS:],
        feeder_s=fed[WARM_TURNS:],
        roles_s=summed,
        samples=plan.steps * plan.config.batch_size,
        moved_bytes=sum(one[1] for one in gathered),
    )


def _spent_s(processes: list[int]) -> float:
    return sum(process_ns(process) for process in processes) / 1e9


def _sent_bytes(way: Way) -> int:
    if way.backend != BACKEND_NAME:
        return 0
    counters = communicator().counters()
    return sum(counters.get(name, 0) for name in SENT)


def _family(process: int) -> list[int]:
    """A process, those that it started, and those that they did."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            # proc(5): behind the command name, which may contain anything, come the state and the parent.
            parents[int(folder.name)] = int((folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])
    found = [process]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found
