# SPDX-License-Identifier: Apache-2.0
"""Described models and clusters of `sennit roofline` (TOML, docs/reference/roofline.md), and this machine, measured."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from sennit.runtime.kernels.optimizers import NAMED, OptimizerSpec
from sennit.runtime.kernels.spec import MAX_DIM, Precision, ShardSpec
from sennit.runtime.model.toml_file import (
    Check,
    choice,
    integer,
    names_of,
    number,
    read_toml,
    refused,
    section,
    size,
)
from sennit.runtime.planner.cluster import MAX_RANKS
from sennit.runtime.planner.constants import Constants
from sennit.runtime.planner.one_thread import one_thread
from sennit.runtime.planner.roofline import SPREADS, Link, Machines, Tables, Tier, Workload
from sennit.runtime.planner.usage import ZIPF, assumed
from sennit.runtime.sharded.shards import expected
from sennit.runtime.sharded.tables import Table
from sennit.transport.codecs import COLLECTIVE_CODECS
from sennit.transport.errors import ConfigError
from sennit.transport.plans.coding import CodecKind
from sennit.transport.sizes import parse_size

# Bytes of a number on a link, without the scales of blocks.
CODED_BYTES: Final[dict[CodecKind, float]] = {
    CodecKind.FP16: 2, CodecKind.BF16: 2, CodecKind.FP8_E4M3: 1, CodecKind.FP8_E5M2: 1, CodecKind.INT8: 1,
    CodecKind.MX4: 0.5,
}  # fmt: skip
# A copy reads a byte and writes one, whose line the processor may have to read before.
COPY_BYTES: Final = 3
# Bytes of states that dense optimizers hold for a weight.
STATE_BYTES: Final = {"sgd": 0.0, "adagrad": 4.0, "adam": 8.0}
MAX_ROWS: Final = 1 << 48
# Bytes of a measured read: far more than caches have.
READ_BYTES: Final = 256 << 20
READ_TURNS: Final = 4

_ROW_WISE_ADAGRAD: Final = OptimizerSpec()
_ABOVE_0: Final = number("above 0", lambda value: value > 0)
_FROM_0: Final = number("0 or more", lambda value: value >= 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Described:
    """A model from a file, and the speed that others published for it."""

    work: Workload
    reported_samples_per_s: float | None = None
    reported_by: str = ""


def _text(place: str, value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise refused(place, value, "a text")
    return value


def _sections(checks: Mapping[str, Check], *needed: str) -> Check:
    """One section or more, each with a name of its own."""

    def check(place: str, value: Any) -> list[dict[str, Any]]:
        if not isinstance(value, list) or not value:
            raise refused(place, value, f"one [[{place.rpartition(' ')[2]}]] or more")
        found = []
        for turn, one in enumerate(value):
            name = one.get("name", turn + 1) if isinstance(one, dict) else turn + 1
            found.append(_with(f"{place} {name}", section(f"{place} {name}", one, checks), *needed))
        names = [one["name"] for one in found]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ConfigError(f"{place}: two are called {twice[0]}")
        return found

    return check


def _with(place: str, found: dict[str, Any], *needed: str) -> dict[str, Any]:
    if missing := [name for name in needed if name not in found]:
        raise ConfigError(f"{place}: {missing[0]} is missing")
    return found


def _widths(place: str, value: Any) -> list[int]:
    if not isinstance(value, list):
        raise refused(place, value, "widths, such as [512, 256]")
    return [integer(1, 1 << 20)(place, one) for one in value]


_NUMBERS: Final = {"fp32": 4.0, **{name: CODED_BYTES[kind] for name, kind in COLLECTIVE_CODECS.items()}}
_TABLE: Final[dict[str, Check]] = {
    "name": _text,
    "count": integer(1, 1 << 20),
    "rows": integer(1, MAX_ROWS),
    "dim": integer(1, MAX_DIM),
    "pooling": _ABOVE_0,
    "precision": choice(names_of(Precision)),
    "optimizer": choice({name: OptimizerSpec.named(name) for name in NAMED}),
    "spread": choice({name: name for name in SPREADS}),
    "zipf": number("0 (uniform) to 4", lambda value: 0 <= value <= 4),
}
_MODEL: Final[dict[str, Check]] = {
    "name": _text,
    "batch": integer(1, 1 << 40),
    "exchange": choice(_NUMBERS),
    "gradient": choice(_NUMBERS),
    "dense": integer(0, 1 << 20),
    "bottom": _widths,
    "top": _widths,
    "mflop": _ABOVE_0,
    "dense_parameters": _FROM_0,
    "dense_optimizer": choice(STATE_BYTES),
    "reported_samples_per_s": _ABOVE_0,
    "reported_by": _text,
    "table": _sections(_TABLE, "name", "rows", "dim", "pooling"),
}
_WAYS: Final = {"flops": ("mflop", "dense_parameters"), "widths": ("dense", "bottom", "top")}


def read_model(path: Path) -> Described:
    """A described model. Raises `ConfigError` that names file, field, value and what is allowed."""
    found = _with(str(path), section(str(path), read_toml(path), _MODEL), "batch", "table")
    tables = [_tables(**one) for one in found["table"]]
    by_flops, by_widths = [[name for name in names if name in found] for name, names in _WAYS.items()]
    if bool(by_flops) == bool(by_widths) or len(by_flops) == 1:
        raise ConfigError(f"{path}: the dense part; allowed: mflop and dense_parameters, or dense, bottom and top")
    if by_flops:
        flops, weights = 3e6 * found["mflop"], found["dense_parameters"]
    else:
        dims = {one.dim for one in tables}
        if len(dims) > 1:
            raise ConfigError(
                f"{path}: bottom and top for tables of dim {', '.join(map(str, sorted(dims)))}; allowed: one dim, or "
                "mflop and dense_parameters"
            )
        _with(str(path), found, "top")
        count = sum(one.count for one in tables)
        flops, weights = dlrm(found.get("dense", 0), count, dims.pop(), found.get("bottom", []), found["top"])
    work = Workload(
        name=found.get("name", path.stem),
        tables=tables,
        batch=found["batch"],
        dense_flops=flops,
        dense_numbers=weights,
        dense_state_bytes=found.get("dense_optimizer", STATE_BYTES["adagrad"]),
        exchange_bytes=found.get("exchange", 4.0),
        gradient_bytes=found.get("gradient", 4.0),
    )
    return Described(
        work=work,
        reported_samples_per_s=found.get("reported_samples_per_s"),
        reported_by=found.get("reported_by", ""),
    )


def _tables(
    *,
    name: str,
    rows: int,
    dim: int,
    pooling: float,
    count: int = 1,
    precision: Precision = Precision.FP32,
    optimizer: OptimizerSpec = _ROW_WISE_ADAGRAD,
    spread: str = "table",
    zipf: float = ZIPF,
) -> Tables:
    row_bytes = dim * precision.dtype.itemsize
    # A shard of one row: the least that has all of a row's states.
    row = expected(ShardSpec(name=name, row_count=1, dim=dim, precision=precision), optimizer)
    whole = sum(math.prod(shape) * dtype.itemsize for shape, dtype in row.values())
    return Tables(
        name=name, count=count, rows=rows, dim=dim, length=pooling, row_bytes=row_bytes,
        state_bytes=whole - row_bytes, spread=spread, use=assumed(Table(name=name, rows=rows, dim=dim), pooling, zipf),
    )  # fmt: skip


def dlrm(dense: int, tables: int, dim: int, bottom: list[int], top: list[int]) -> tuple[float, float]:
    """Floating-point operations of a sample's forward and backward pass through a DLRM, and its dense weights.

    As `sennit.runtime.model.dlrm`: products of all ordered pairs, and no gradient for the dense features.
    """
    vectors = tables + (dense > 0)
    layers = list(zip([dense, *bottom], [*bottom, dim], strict=True)) if dense else []
    seen = vectors * (vectors - 1) // 2 + (dim if dense else 0)
    layers_top = list(zip([seen, *top], [*top, 1], strict=True))
    products = 2 * vectors * vectors * dim
    flops = sum(6 * wide * out for wide, out in layers + layers_top) + 3 * products
    if layers:
        flops -= 2 * layers[0][0] * layers[0][1]
    return float(flops), float(sum((wide + 1) * out for wide, out in layers + layers_top))


_TIER: Final[dict[str, Check]] = {"name": _text, "size": size("40GiB"), "gbyte_s": _ABOVE_0}
_CLUSTER: Final[dict[str, Check]] = {
    "name": _text,
    "hosts": integer(1, MAX_RANKS),
    "devices": integer(1, MAX_RANKS),
    "tflops": _ABOVE_0,
    "cache": size("40GiB"),
    "near_gbit": _ABOVE_0,
    "near_us": _FROM_0,
    "far_gbit": _ABOVE_0,
    "far_us": _FROM_0,
    "tier": _sections(_TIER, "name", "size", "gbyte_s"),
}


def read_machines(path: Path) -> Machines:
    """A described cluster. Raises `ConfigError` that names file, field, value and what is allowed."""
    found = _with(str(path), section(str(path), read_toml(path), _CLUSTER), "hosts", "devices", "tflops", "tier")
    if found["hosts"] * found["devices"] > MAX_RANKS:
        raise ConfigError(f"{path}: {found['hosts']} hosts of {found['devices']} devices; allowed: {MAX_RANKS} devices")
    if found["devices"] > 1:
        _with(str(path), found, "near_gbit", "near_us")
    if found["hosts"] > 1:
        _with(str(path), found, "far_gbit", "far_us")
    links = {
        way: Link(bytes_per_s=found.get(f"{way}_gbit", 1.0) * 1e9 / 8, latency_s=found.get(f"{way}_us", 0.0) * 1e-6)
        for way in ("near", "far")
    }
    return Machines(
        name=found.get("name", path.stem),
        hosts=found["hosts"],
        devices=found["devices"],
        flops_per_s=found["tflops"] * 1e12,
        tiers=[
            Tier(name=one["name"], size_bytes=one["size"], bytes_per_s=one["gbyte_s"] * 1e9) for one in found["tier"]
        ],
        near=links["near"],
        far=links["far"],
        cache_bytes=found.get("cache", 0.0),
    )


def this_machine(
    constants: Constants,
    *,
    ranks: int,
    cores: int,
    memory_bytes: float,
    cache_bytes: float,
    read_bytes_per_s: float = 0.0,
    file_bytes: float = 0.0,
) -> Machines:
    """Ranks of one thread each on this host, as `sennit calibrate` measured it.

    `memory_bytes`, `cache_bytes`, `file_bytes`: of a rank. With a file, memory is the cache of its rows.
    `read_bytes_per_s`: of one thread, if it was measured (`read_rate`); a copy may show that memory is faster.
    """
    near, crowding = constants.network.shared_memory, constants.crowding()
    copy_s = constants.memory.copy_byte_s
    if min(copy_s, constants.gemm.flop_s) <= 0:
        raise ConfigError("the calibration says that a copy or a product takes no time; run sennit calibrate again")
    tiers = [Tier(name="memory", size_bytes=memory_bytes, bytes_per_s=max(read_bytes_per_s, COPY_BYTES / copy_s))]
    if file_bytes:
        file_s = max(constants.memory.file_byte_s, 1e-15)
        tiers.append(Tier(name="file", size_bytes=file_bytes, bytes_per_s=1 / file_s))
    return Machines(
        name="this machine",
        hosts=1,
        devices=ranks,
        flops_per_s=1 / constants.gemm.flop_s,
        tiers=tiers,
        # What a rank sends may be a copy in memory, which is faster than the messages that were measured.
        near=Link(bytes_per_s=max(1 / copy_s, crowding / max(near.byte_s, 1e-15)), latency_s=near.round_s / crowding),
        far=Link(bytes_per_s=1.0),
        cache_bytes=cache_bytes,
        turns=max(1.0, ranks / cores),
    )


def read_rate() -> float:
    """Bytes a second that one thread reads from memory here: the best of some passes, as other programs only slow it.

    It takes a tenth of a second or a few.
    """
    with one_thread():
        numbers = torch.ones(READ_BYTES // 4)
        best = math.inf
        calls: tuple[Callable[[], object], ...] = (numbers.sum, lambda: torch.dot(numbers, numbers))
        for call in calls:
            for _ in range(READ_TURNS):
                start_s = time.perf_counter()
                call()
                best = min(best, time.perf_counter() - start_s)
    return READ_BYTES / best


def caches_here() -> float:
    """Bytes of all data caches of this machine; inf if the kernel does not say."""
    total, known = 0.0, set()
    for index in sorted(Path("/sys/devices/system/cpu").glob("cpu[0-9]*/cache/index*")):
        try:
            kind, level, shared = (
                (index / name).read_text(encoding="utf-8").strip() for name in ("type", "level", "shared_cpu_list")
            )
            if kind != "Instruction" and (level, shared) not in known:
                known.add((level, shared))
                total += parse_size(
                    (index / "size").read_text(encoding="utf-8").strip().replace("K", "KiB").replace("M", "MiB")
                )
        except (OSError, ValueError):
            return math.inf
    return total or math.inf


def scaled(work: Workload, factor: int) -> Workload:
    """The same parameters in `factor` times as many tables."""
    tables = [
        dataclasses.replace(
            one,
            count=one.count * factor,
            rows=max(1, one.rows // factor),
            use=assumed(Table(name=one.name, rows=max(1, one.rows // factor), dim=one.dim), one.length),
        )
        for one in work.tables
    ]
    return dataclasses.replace(work, tables=tables)
