# SPDX-License-Identifier: Apache-2.0
"""`sennit bench offload`: the cost of a record in XDP, in the native core and in NumPy, for common model shapes.

BPF_PROG_TEST_RUN times XDP without a device. Each run takes the packet as the next one of its batch, so whole batches
of columns are written. The native core and NumPy transform decoded batches. XDP's results are first compared with
NumPy's.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
from rich.console import Console
from rich.table import Table

from sennit.offload.batches import BatchLayout
from sennit.offload.columns import ColumnValues, Ragged
from sennit.offload.framing import frame
from sennit.offload.host_receiver import HostReceiver
from sennit.offload.native import NativeTransform
from sennit.offload.operators import Clamp, FirstX, Operator, PositiveModulus, SigridHash
from sennit.offload.plan import FeaturePlan, Sparse
from sennit.offload.records import Rows, encode_packets, encode_records
from sennit.offload.reference import evaluate
from sennit.offload.schema import Dense, Ids, Schema
from sennit.offload.xdp import XdpReceiver
from sennit.runtime.calibrate import machine

BATCH_ROWS: Final = 4096
# Fits an MTU of 3,506 bytes, the largest that native XDP takes on a virtual interface.
BODY_MAX_BYTES: Final = 3400
UDP_PORT: Final = 4800
SESSION: Final = 1
TABLES: Final = 26
DENSE: Final = 13
FIRST_ROWS: Final = 100_003


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result for one shape."""

    shape: str
    records_a_packet: int
    packet_bytes: int
    xdp_ns_a_record: float
    """Nanoseconds of XDP with the sketch of ids, which plans include by default."""

    xdp_without_sketch_ns_a_record: float
    ids_a_record: float
    cpu_ns_a_record: float
    numpy_ns_a_record: float


def shapes() -> dict[str, FeaturePlan]:
    """26 sparse and 13 dense fields, as in Criteo's data; and 26 lists."""
    dense = tuple(Dense(name=f"d{n}") for n in range(DENSE))
    single = tuple(Ids(name=f"s{n}") for n in range(TABLES))
    clamps: dict[str, Operator] = {f"c{n}": Clamp(column=f"d{n}", low=0.0, high=1.0) for n in range(DENSE)}
    moduli = {f"t{n}": PositiveModulus(column=f"s{n}", divisor=FIRST_ROWS + n) for n in range(TABLES)}
    hashes = {f"t{n}": SigridHash(column=f"s{n}", salt=n, max_value=FIRST_ROWS + n) for n in range(TABLES)}
    tables = tuple(Sparse(column=f"t{n}", rows=FIRST_ROWS + TABLES) for n in range(TABLES))
    flat = Schema(dense=dense, ids=single)
    clamped = tuple(clamps)
    lists = Schema(ids=tuple(Ids(name=f"s{n}", length=16, is_list=True) for n in range(TABLES)))
    first: dict[str, Operator] = {f"f{n}": FirstX(column=f"s{n}", count=8) for n in range(TABLES)}
    hashed = {f"t{n}": SigridHash(column=f"f{n}", salt=n, max_value=FIRST_ROWS + n) for n in range(TABLES)}
    return {
        "26 ids modulo, 13 clamped": FeaturePlan(schema=flat, columns=clamps | moduli, dense=clamped, sparse=tables),
        "26 ids hashed, 13 clamped": FeaturePlan(schema=flat, columns=clamps | hashes, dense=clamped, sparse=tables),
        "26 lists, FirstX(8), hashed": FeaturePlan(schema=lists, columns=first | hashed, sparse=tables),
    }


def rows_of(schema: Schema, count: int, rng: np.random.Generator) -> Rows:
    columns: dict[str, ColumnValues] = {
        part.name: rng.standard_normal(count).astype(np.float32) for part in schema.dense
    }
    for part in schema.ids:
        lengths = rng.integers(0, part.length + 1, count) if part.is_list else np.ones(count)
        values = rng.integers(0, 1 << 32, int(lengths.sum()))
        columns[part.name] = Ragged(lengths.astype(np.int32), values)
    return Rows(labels=rng.integers(0, 2, count).astype(np.float32), columns=columns)


def run(*, rounds: int, repeat: int, seed: int) -> list[Result]:
    results = []
    for name, plan in shapes().items():
        rng = np.random.default_rng(seed)
        rows = rows_of(plan.schema, BATCH_ROWS, rng)
        records = encode_records(plan.schema, rows)
        layout = BatchLayout(plan=plan, batch_rows=BATCH_ROWS)
        packets = encode_packets(plan.schema, records, session=SESSION, batch=0, body_max_bytes=BODY_MAX_BYTES)
        native = NativeTransform(plan.graph, plan.outputs)
        numpy_ns = median_ns(functools.partial(evaluate, plan.graph, rows.columns, plan.outputs), rounds) / BATCH_ROWS
        cpu_ns = median_ns(functools.partial(native, rows.columns), rounds) / BATCH_ROWS
        with (
            XdpReceiver(layout, session=SESSION, udp_port=UDP_PORT, repeatable=True) as receiver,
            XdpReceiver(layout, session=SESSION, udp_port=UDP_PORT, repeatable=True, sketch=None) as without,
        ):
            _check(receiver, layout, packets)
            most = int.from_bytes(packets[0][20:22], "big")
            for many in sorted({1, min(8, most), most}):
                packet = encode_packets(
                    plan.schema, records[:many], session=SESSION, batch=1, body_max_bytes=BODY_MAX_BYTES
                )[0]
                framed = frame(packet, UDP_PORT)
                # In turn, so that a disturbance hits both.
                runs = [
                    [
                        target.repeated_program.test_run(framed, repeat=repeat).duration_ns
                        for target in (receiver, without)
                    ]
                    for _ in range(rounds)
                ]
                xdp_ns, without_ns = (statistics.median(times) / many for times in zip(*runs, strict=True))
                ids = sum(int(lengths[:many].sum()) for lengths in receiver.layout.lengths(receiver.memory, 0))
                results.append(
                    Result(
                        shape=name,
                        records_a_packet=many,
                        packet_bytes=len(framed),
                        xdp_ns_a_record=xdp_ns,
                        xdp_without_sketch_ns_a_record=without_ns,
                        ids_a_record=ids / many,
                        cpu_ns_a_record=cpu_ns,
                        numpy_ns_a_record=numpy_ns,
                    )
                )
    return results


def _check(receiver: XdpReceiver, layout: BatchLayout, packets: list[bytes]) -> None:
    """Raises unless XDP and NumPy make the same batch of the packets."""
    with HostReceiver(layout, session=SESSION) as reference:
        for packet in packets:
            receiver.deliver(packet)
            reference.deliver(packet)
        found, expected = receiver.batch(0), reference.batch(0)
        same = [np.array_equal(*pair) for pair in zip(found.values, expected.values, strict=True)]
        same += [np.array_equal(found.dense, expected.dense), np.array_equal(found.lengths, expected.lengths)]
        if not all(same) or len(found.labels) != layout.batch_rows:
            raise RuntimeError("XDP and NumPy do not agree: run tests/offload")


def median_ns(function: Callable[[], Any], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        start = time.perf_counter_ns()
        function()
        times.append(time.perf_counter_ns() - start)
    return statistics.median(times)


def render(results: list[Result], console: Console) -> None:
    table = Table(
        "shape", "records a packet", "XDP ns a record", "no sketch", "XDP ns an id", "CPU ns a record", "NumPy / CPU"
    )
    for result in results:
        table.add_row(
            result.shape,
            str(result.records_a_packet),
            f"{result.xdp_ns_a_record:.1f}",
            f"{result.xdp_without_sketch_ns_a_record:.1f}",
            f"{result.xdp_ns_a_record / result.ids_a_record:.2f}",
            f"{result.cpu_ns_a_record:.0f}",
            f"{result.numpy_ns_a_record / result.cpu_ns_a_record:.1f}",
        )
    console.print(table)


def as_json(results: list[Result]) -> dict[str, Any]:
    found = [{**asdict(result), "numpy / cpu": result.numpy_ns_a_record / result.cpu_ns_a_record} for result in results]
    return {"machine": machine.describe(), "results": found}
