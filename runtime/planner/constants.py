# SPDX-License-Identifier: Apache-2.0
"""What the kernels and the memory of a machine cost: a part of the file of `sennit calibrate`.

The network's part is `sennit.transport.choice.calibration`. A file without kernels keeps the constants that stand here.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from sennit.runtime.kernels.optimizers import Optimizer, OptimizerSpec, StateShape
from sennit.transport.choice.calibration import Calibration, read_calibration
from sennit.transport.errors import ConfigError

SCHEMA: Final = 1
# The upper limit of every constant: a second for each byte or call.
VALUE_MAX: Final = 1.0
CONTENTION_MAX: Final = 100.0
PRECISIONS: Final = ("fp32", "fp16", "bf16")
MOMENTUM: Final = "sgd_momentum"
"""The name of SGD with momentum: an optimizer with a state of its own."""
OPTIMIZERS: Final = (*(kind.value for kind in Optimizer), MOMENTUM)
_FLOAT_BYTES: Final = 4

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """Seconds of one thread in a lookup or an update of a table, by what it works on. E is an element of a vector."""

    bag_s: float
    bag_element_s: float
    id_s: float
    id_element_s: float
    row_s: float
    """Seconds for each distinct row, which comes from memory. Other ids find the row in a cache."""
    row_element_s: float

    def seconds(self, *, bags: Any, ids: Any, rows: Any, dim: Any) -> Any:
        """Numbers, or arrays of one shape."""
        return (
            bags * (self.bag_s + dim * self.bag_element_s)
            + ids * (self.id_s + dim * self.id_element_s)
            + rows * (self.row_s + dim * self.row_element_s)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerStep:
    """Seconds of one thread that an optimizer takes more than row-wise AdaGrad, with which `update` is measured. Below
    0: it takes less.
    """

    row_s: float
    """Seconds for each distinct row, whose states come from memory."""
    row_element_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Overhead:
    """Seconds of a phase of the library that do not depend on the size of the batch."""

    step_s: float
    table_s: float
    """Seconds for each shard on the rank."""
    block_s: float
    """Seconds for each shard and slice of the global batch."""

    def seconds(self, tables: Any, slices: int) -> Any:
        return tables * (self.table_s + slices * self.block_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ids:
    """Seconds of one thread for the ids of a rank's samples."""

    id_s: float
    """Seconds to check and pack an id."""
    dealt_id_s: float
    """Seconds to deal an id to row shards."""
    dealt_bag_s: float
    """Seconds to deal a bag, for each row shard."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """The tiers that rows can be in, and copies between buffers."""

    copy_byte_s: float
    """A byte read and written in memory, by one thread."""
    fresh_byte_s: float
    """A byte of a buffer whose pages come from the kernel: what it takes beyond `copy_byte_s`."""
    file_row_s: float
    """A row read from a file behind a cache, and later written back."""
    file_byte_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Gemm:
    """Products of matrices, float32, by one thread."""

    flop_s: float
    operator_s: float
    """Seconds for each call, however small."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Replicas:
    """Seconds of one thread that the library takes for tables on every rank, however small they are."""

    step_s: float
    table_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharing:
    """What ranks and threads that share cores cost each other, beyond their turns, as shares of a step."""

    crowd: float
    """What ranks cost each other if a core has two or more: they share caches, and wait for ranks that do not run. With
    fewer ranks a part of it counts.
    """
    switches: float
    """What a further thread in each rank costs if all cores are in use."""


def _kernels(**values: tuple[float, ...]) -> dict[str, Kernel]:
    names = [one.name for one in dataclasses.fields(Kernel)]
    return {
        precision: Kernel(**{name: value * 1e-9 for name, value in zip(names, found, strict=True)})
        for precision, found in values.items()
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Constants:
    """The kernels of a machine. Without arguments: an AMD EPYC of the fifth generation (docs/reference/planner.md)."""

    lookup: Mapping[str, Kernel] = field(
        default_factory=lambda: _kernels(
            fp32=(2.6, 0.06, 1.2, 0.011, 0.6, 0.042), fp16=(2.6, 0.06, 1.2, 0.010, 0.5, 0.016),
            bf16=(2.6, 0.06, 1.2, 0.010, 0.5, 0.016),
        )
    )  # fmt: skip
    """By the precision of a table."""
    update: Mapping[str, Kernel] = field(
        default_factory=lambda: _kernels(
            fp32=(4.0, 0.06, 3.9, 0.023, 6.0, 0.115), fp16=(4.0, 0.06, 3.9, 0.023, 20.0, 0.55),
            bf16=(4.0, 0.06, 3.9, 0.023, 20.0, 0.55),
        )
    )  # fmt: skip
    optimizers: Mapping[str, OptimizerStep] = field(default_factory=dict)
    """By the names in `OPTIMIZERS`. One that is not there takes what its states take to be read and written."""
    ids: Ids = Ids(id_s=1.4e-9, dealt_id_s=4e-9, dealt_bag_s=2e-9)
    overhead: Mapping[str, Overhead] = field(
        default_factory=lambda: {
            "ids": Overhead(step_s=2e-4, table_s=8e-6, block_s=5e-7),
            "lookup": Overhead(step_s=5e-5, table_s=4e-6, block_s=5e-7),
            "update": Overhead(step_s=5e-5, table_s=6e-6, block_s=1e-6),
        }
    )
    """By phase of a step."""
    memory: Memory = Memory(copy_byte_s=6e-11, fresh_byte_s=2.5e-10, file_row_s=6e-6, file_byte_s=1e-9)
    gemm: Gemm = Gemm(flop_s=1.2e-11, operator_s=1e-5)
    replicas: Replicas = Replicas(step_s=3.5e-4, table_s=1e-5)
    sharing: Sharing = Sharing(crowd=0.3, switches=0.07)
    contention: float = 1.1
    """The factor by which computing is slower if all cores compute: they share caches and memory."""
    network: Calibration = field(default_factory=Calibration)
    has_kernels: bool = False
    """Whether the constants come from a file."""
    cores: int = 0
    """Cores of the machine that was measured, and the ranks that shared them then; 0: not known."""
    ranks: int = 0

    def update_of(self, precision: str, optimizer: OptimizerSpec) -> Kernel:
        """The update of a table of this precision by this optimizer."""
        kernel = self.update[precision]
        step = self.optimizers.get(MOMENTUM if optimizer.momentum else optimizer.kind.value)
        if step is None:
            floats, usual = (Counter(one.states.values()) for one in (optimizer, OptimizerSpec()))
            float_s = _FLOAT_BYTES * self.memory.copy_byte_s
            step = OptimizerStep(
                row_s=(floats[StateShape.ROW] - usual[StateShape.ROW]) * float_s,
                row_element_s=floats[StateShape.ELEMENT] * float_s,
            )
        return dataclasses.replace(
            kernel,
            row_s=max(kernel.row_s + step.row_s, 0.0),
            row_element_s=max(kernel.row_element_s + step.row_element_s, 0.0),
        )

    def crowding(self) -> float:
        """The factor by which a rank was slower when the network was measured, because ranks shared cores."""
        return max(1.0, self.ranks / self.cores) if self.cores else 1.0


PHASES: Final = ("ids", "lookup", "update")


_PARTS: Final[dict[str, tuple[type[Any], float]]] = {
    "ids": (Ids, VALUE_MAX),
    "memory": (Memory, VALUE_MAX),
    "gemm": (Gemm, VALUE_MAX),
}
# Files of an earlier version have none of these.
_LATER_PARTS: Final[dict[str, tuple[type[Any], float]]] = {
    "replicas": (Replicas, VALUE_MAX),
    "sharing": (Sharing, CONTENTION_MAX),
}


def as_json(constants: Constants) -> dict[str, Any]:
    """The part `kernels` of a file."""
    return {
        "schema": SCHEMA,
        **{
            name: {key: dataclasses.asdict(one) for key, one in getattr(constants, name).items()}
            for name in ("lookup", "update", "optimizers", "overhead")
        },
        **{name: dataclasses.asdict(getattr(constants, name)) for name in (*_PARTS, *_LATER_PARTS)},
        "contention": constants.contention,
    }


def read_constants(path: str | None) -> tuple[Constants, list[str]]:
    """The constants of a file, and what to warn of: its age, another host, another processor, no kernels in it.

    Raises `ConfigError` that names file and field.
    """
    network = read_calibration(path)
    if path is None:
        return Constants(network=network), [
            "no calibration (SENNIT_CALIBRATION): built-in constants of another machine"
        ]
    found = json.loads(Path(path).read_bytes())
    cores, ranks = (found.get(name) for name in ("cores", "ranks"))
    known: dict[str, Any] = {
        "network": network,
        "cores": cores if isinstance(cores, int) and cores > 0 else 0,
        "ranks": ranks if isinstance(ranks, int) and ranks > 0 else 0,
    }
    warnings = list(network.notes)
    kernels = found.get("kernels")
    if kernels is None:
        warnings.append(f"{path} has no kernels: built-in constants of another machine; run sennit calibrate again")
        return Constants(**known), warnings
    place = f"calibration file {path}: field kernels"
    if _section(place, kernels).get("schema") != SCHEMA:
        raise ConfigError(f"{place}.schema is {kernels.get('schema')!r:.40}; allowed: {SCHEMA}")
    by_name: tuple[tuple[str, type[Any], tuple[str, ...]], ...] = (
        ("lookup", Kernel, PRECISIONS),
        ("update", Kernel, PRECISIONS),
        ("overhead", Overhead, PHASES),
    )
    allowed = {"schema", "contention", "optimizers", *(name for name, *_ in by_name), *_PARTS, *_LATER_PARTS}
    if unknown := sorted(set(kernels) - allowed):
        raise ConfigError(f"{place}.{unknown[0]:.40} is unknown; allowed: {', '.join(sorted(allowed))}")
    for name, kind, keys in by_name:
        section = _section(f"{place}.{name}", kernels.get(name))
        if missing := [key for key in keys if key not in section]:
            raise ConfigError(f"{place}.{name}.{missing[0]} is missing")
        known[name] = {key: _numbers(f"{place}.{name}.{key}", section[key], kind, VALUE_MAX) for key in keys}
    if "optimizers" in kernels:
        section = _section(f"{place}.optimizers", kernels["optimizers"])
        if unknown := sorted(set(section) - set(OPTIMIZERS)):
            raise ConfigError(
                f"{place}.optimizers.{unknown[0]:.40} is unknown; allowed: {', '.join(sorted(OPTIMIZERS))}"
            )
        known["optimizers"] = {
            key: _numbers(f"{place}.optimizers.{key}", section[key], OptimizerStep, VALUE_MAX, least=-VALUE_MAX)
            for key in section
        }
    for name, (kind, most) in {**_PARTS, **_LATER_PARTS}.items():
        if name in kernels or name in _PARTS:
            known[name] = _numbers(f"{place}.{name}", kernels.get(name), kind, most)
    slower = kernels.get("contention")
    if isinstance(slower, bool) or not isinstance(slower, int | float) or not 1 <= slower <= CONTENTION_MAX:
        raise ConfigError(f"{place}.contention is {slower!r:.40}; allowed: a ratio, 1..{CONTENTION_MAX:g}")
    return Constants(has_kernels=True, contention=float(slower), **known), warnings


def cores_here() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0))


def _section(place: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{place} is {value!r:.40}; allowed: an object")
    return value


def _numbers(place: str, given: object, kind: type[_T], most: float, *, least: float = 0.0) -> _T:
    values = {}
    section = _section(place, given)
    for one in dataclasses.fields(kind):  # type: ignore[arg-type]
        value = section.get(one.name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise ConfigError(f"{place}.{one.name} is {value!r:.40}; allowed: a number, {least:g}..{most:g}")
        values[one.name] = float(value)
    return kind(**values)
