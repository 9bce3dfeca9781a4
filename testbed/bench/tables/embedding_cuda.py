# SPDX-License-Identifier: Apache-2.0
"""`sennit bench embedding --device cuda`: the Triton operator at the shape of NVIDIA's recsys-examples benchmark.

10 tables, 1,048,570 lookups without pooling, dim 128 in fp32, ids by a power law with exponent 1.05. Published there
for an H100: FBGEMM's forward 0.345 ms, backward with SGD 0.614 ms, with Adam 1.005 ms. Row-wise AdaGrad and uniform ids
are beside them, for which nothing is published. Times are medians of replays of a CUDA graph, so Python's launches do
not count. Times of plain calls are shown too. A call beforehand compiles the kernels. Bandwidth is compared with a copy
in the same run.
"""

from __future__ import annotations

import functools
import importlib.metadata
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from sennit.runtime.calibrate import machine
from sennit.runtime.kernels.batch import Batch
from sennit.runtime.kernels.layout import ShardMemory, allocate
from sennit.runtime.kernels.optimizers import Optimizer, OptimizerSpec
from sennit.runtime.kernels.spec import Pooling, Rounding, ShardSpec
from sennit.runtime.kernels.triton_operator import TritonOperator

TABLES: Final = 10
LOOKUPS: Final = 1_048_570
DIM: Final = 128
ROWS: Final = 1_000_000
"""Rows of each table. Gives about as many distinct rows as the peer's data, 350,000."""
EXPONENT: Final = 1.05
COPY_BYTES: Final = 1 << 30
INTERPRETER: Final = "Triton's interpreter"
_FP32_BYTES: Final = 4

# The peer's published milliseconds on an H100.
GOALS_MS: Final = {"forward": 0.345, "backward+sgd": 0.614, "backward+adam": 1.005}

OPTIMIZERS: Final = (Optimizer.SGD, Optimizer.ADAM, Optimizer.ROW_WISE_ADAGRAD)
UNIFORM: Final = ", uniform ids"
"""The end of the names of operations whose ids are uniform."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """The times of one operation."""

    name: str
    graph_ms: float
    """Median over replays of a graph."""

    graph_min_ms: float
    graph_max_ms: float
    call_ms: float
    """Median over plain calls, launches included."""

    bytes_moved: int
    """Rows, states, results and gradients, each read or written once. Ids and the sort do not count."""

    distinct_rows: int
    """Distinct rows of the batch, over all tables."""

    share_of_copy: float
    """Share of the bandwidth of a copy in this run."""

    goal_ms: float | None
    """The peer's published milliseconds; None: nothing is published."""


@dataclass(frozen=True, kw_only=True)
class Untimed:
    """An operation that ran in Triton's interpreter, where time says nothing."""

    name: str
    bytes_moved: int
    distinct_rows: int


def power_law_batch(device: torch.device, seed: int, *, lookups: int = LOOKUPS, rows: int = ROWS) -> Batch:
    """Sequences for `TABLES` tables. The k-th most frequent row is drawn with weight k^-1.05; rows are shuffled."""
    generator = torch.Generator().manual_seed(seed)
    share = torch.arange(1, rows + 1, dtype=torch.float64).pow(-EXPONENT).cumsum(0)
    bags = lookups // TABLES
    values = []
    for _ in range(TABLES):
        drawn = torch.rand(bags, generator=generator, dtype=torch.float64) * share[-1]
        values.append(torch.randperm(rows, generator=generator)[torch.searchsorted(share, drawn).clamp(max=rows - 1)])
    return _sequences(torch.cat(values), device)


def uniform_batch(device: torch.device, seed: int, *, lookups: int = LOOKUPS, rows: int = ROWS) -> Batch:
    """Sequences for `TABLES` tables. All rows are drawn equally often."""
    generator = torch.Generator().manual_seed(seed)
    return _sequences(torch.randint(rows, (lookups // TABLES * TABLES,), generator=generator), device)


def _sequences(values: Tensor, device: torch.device) -> Batch:
    bags = len(values) // TABLES
    return Batch(
        table_of_block=tuple(range(TABLES)),
        bags_of_block=(bags,) * TABLES,
        lengths=torch.ones(bags * TABLES, dtype=torch.int64, device=device),
        values=values.to(device),
        pooling=Pooling.NONE,
    )


def run(
    *,
    rounds: int,
    seed: int,
    device: str = "cuda",
    lookups: int = LOOKUPS,
    rows: int = ROWS,
    dim: int = DIM,
    save: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:
    """The whole report. On "cuda" it needs 20 GB of memory. On "cpu" (Triton's interpreter) nothing is timed.

    `save` gets the results so far after each optimizer. Raises RuntimeError if bits do not repeat.
    """
    where, is_timed = torch.device(device), device != "cpu"
    batches = {
        "": power_law_batch(where, seed, lookups=lookups, rows=rows),
        UNIFORM: uniform_batch(where, seed, lookups=lookups, rows=rows),
    }
    distinct = {ids: _distinct_rows(batch, rows) for ids, batch in batches.items()}
    gradient = torch.randn(lookups * dim, device=where)
    operator, vector_bytes = TritonOperator(), dim * _FP32_BYTES
    copy_bytes_per_s = copy_speed(where, rounds) if is_timed else None
    results: list[Result | Untimed] = []

    def add(name: str, bytes_moved: int, distinct_rows: int, operation: Callable[[], object]) -> None:
        if copy_bytes_per_s is None:
            operation()
            results.append(Untimed(name=name, bytes_moved=bytes_moved, distinct_rows=distinct_rows))
            return
        graph, call = _graph_ms(operation, rounds), call_ms(operation, rounds)
        middle = statistics.median(graph)
        results.append(
            Result(
                name=name,
                graph_ms=middle,
                graph_min_ms=min(graph),
                graph_max_ms=max(graph),
                call_ms=statistics.median(call),
                bytes_moved=bytes_moved,
                distinct_rows=distinct_rows,
                share_of_copy=bytes_moved / (middle * 1e-3) / copy_bytes_per_s,
                goal_ms=GOALS_MS.get(name),
            )
        )

    for kind in OPTIMIZERS:
        spec = OptimizerSpec(kind=kind)
        tables = random_tables(spec, where, rows, dim)
        row_bytes = sum(one.numel() for one in (tables[0].weight, *tables[0].states.values())) // rows * _FP32_BYTES
        arguments: dict[str, Any] = {
            "kind": kind,
            "constants": spec.constants(step=1, rate=0.01),
            "rounding": Rounding.NEAREST,
            "seed": 0,
        }
        for ids, batch in batches.items():
            update = functools.partial(operator.launch_update, tables, batch, gradient, **arguments)
            _check_that_bits_repeat(update, tables, kind)
            if kind is OPTIMIZERS[0]:
                lookup = functools.partial(operator.lookup, tables, batch)
                add(f"forward{ids}", 2 * lookups * vector_bytes, distinct[ids], lookup)
                del lookup
            moved = lookups * vector_bytes + 2 * distinct[ids] * row_bytes
            add(f"backward+{kind.value}{ids}", moved, distinct[ids], update)
            save({"results": [asdict(one) for one in results]})
        del update, tables  # Before the next ones, for which there may be no room beside them.
    return {
        "machine": machine.describe(),
        "device": torch.cuda.get_device_name(where) if is_timed else INTERPRETER,
        "triton": importlib.metadata.version("triton"),
        "shape": {"tables": TABLES, "lookups": lookups, "dim": dim, "rows": rows, "exponent": EXPONENT},
        "distinct_rows": distinct[""],
        "seed": seed,
        "rounds": rounds,
        "copy_bytes_per_s": copy_bytes_per_s,
        "results": [asdict(one) for one in results],
    }


def render(report: dict[str, Any], console: Console) -> None:
    """Renders the result of `run` as a table."""
    table = Table("operation", "ms", "min to max", "a call, ms", "of a copy", "FBGEMM on an H100", box=None)
    for one in report["results"]:
        table.add_row(
            one["name"],
            f"{one['graph_ms']:.3f}",
            f"{one['graph_min_ms']:.3f} to {one['graph_max_ms']:.3f}",
            f"{one['call_ms']:.3f}",
            f"{one['share_of_copy']:.0%}",
            "" if one["goal_ms"] is None else f"{one['goal_ms']:.3f}",
        )
    console.print(table)
    console.print(f"{report['device']}; {report['distinct_rows']:,} distinct rows")


def random_tables(optimizer: OptimizerSpec, device: torch.device, rows: int, dim: int) -> list[ShardMemory]:
    """`TABLES` tables as `fill` leaves them."""
    tables = [
        allocate(ShardSpec(name=str(number), row_count=rows, dim=dim), optimizer, device) for number in range(TABLES)
    ]
    fill(tables)
    return tables


def fill(tables: Sequence[ShardMemory]) -> None:
    """Normal weights and states of zeros, the same in each call."""
    generator = torch.Generator(tables[0].weight.device).manual_seed(1)
    for table in tables:
        table.weight.normal_(generator=generator)
        for state in table.states.values():
            state.zero_()


def _check_that_bits_repeat(update: Callable[[], object], tables: Sequence[ShardMemory], kind: Optimizer) -> None:
    sums = set()
    for _ in range(2):
        fill(tables)
        update()
        sums.add(tuple(int(table.weight.view(torch.int32).sum(dtype=torch.int64)) for table in tables))
    if len(sums) != 1:
        raise RuntimeError(f"two steps of {kind.value} from the same tables gave different bits")


def _distinct_rows(batch: Batch, rows: int) -> int:
    table = torch.arange(TABLES, device=batch.values.device).repeat_interleave(len(batch.values) // TABLES)
    return len((batch.values + rows * table).unique())  # type: ignore[no-untyped-call]


def call_ms(operation: Callable[[], object], rounds: int) -> list[float]:
    """Milliseconds of plain calls on the device's clock, after one that is not counted."""
    operation()
    found = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        operation()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end))
    return found


def _graph_ms(operation: Callable[[], object], rounds: int) -> list[float]:
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiles, and fills the allocator of the captured stream
        operation()
        operation()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        operation()
    return call_ms(graph.replay, rounds)


def copy_speed(device: torch.device, rounds: int) -> float:
    """Bytes a second that a copy on the device reads and writes."""
    source = torch.zeros(COPY_BYTES // _FP32_BYTES, device=device)
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / (statistics.median(call_ms(lambda: target.copy_(source), rounds)) * 1e-3)
