# SPDX-License-Identifier: Apache-2.0
"""Random plans and records: every target gives exactly the reference's results."""

from __future__ import annotations

import itertools
import random
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, event, given
from hypothesis import strategies as st

from sennit.doctor import capabilities
from sennit.offload._native import Program
from sennit.offload.admission import Verdict
from sennit.offload.batches import BatchLayout
from sennit.offload.cpu import CpuReceiver
from sennit.offload.host_receiver import HostReceiver
from sennit.offload.native import NativeTransform
from sennit.offload.operators import FirstX, Sample, SigridHash
from sennit.offload.plan import FeaturePlan, Sparse
from sennit.offload.records import encode_packets, encode_records
from sennit.offload.reference import evaluate
from sennit.offload.schema import Dense, Ids, Schema
from sennit.offload.sketch import Sketch, SketchShape
from sennit.offload.split import split
from sennit.offload.targets import OwnReceiver, Target, compile_plan
from sennit.offload.xdp import XdpReceiver
from tests.extent import examples
from tests.offload.agreement import assert_same_batch, assert_same_bits, assert_same_column
from tests.offload.strategies import plans, random_rows, sketch_shapes

SESSION = 0x5E55104
BATCH_ROWS = 24


def packets_of(plan: FeaturePlan, seed: int) -> list[bytes]:
    """Returns two batches in packets of different sizes, with some mangled, repeated and early packets in between."""
    rng = np.random.default_rng(seed)
    found: list[bytes] = []
    for batch in (0, 1):
        records = encode_records(plan.schema, random_rows(plan.schema, BATCH_ROWS, rng))
        longest = max(len(record) for record in records)
        good = encode_packets(
            plan.schema, records, session=SESSION, batch=batch, body_max_bytes=max(longest, int(rng.integers(50, 1400)))
        )
        for packet, following in itertools.zip_longest(good, good[1:]):
            if rng.random() < 0.3:
                found.append(mangled(packet, rng))
            if following is not None and rng.random() < 0.2:
                found.append(following)
            found.append(packet)
            if rng.random() < 0.1:
                found.append(packet)
    return found


def mangled(packet: bytes, rng: np.random.Generator) -> bytes:
    """Cuts or lengthens a packet, or changes a byte in the header, or in the body, where only a length can show it."""
    kind = rng.integers(0, 4)
    if kind == 0:
        return packet[: int(rng.integers(1, len(packet)))]
    if kind == 1:
        return packet + rng.bytes(int(rng.integers(1, 9)))
    end = 24 if kind == 2 else len(packet)
    at = int(rng.integers(0, end))
    return packet[:at] + bytes([packet[at] ^ int(rng.integers(1, 256))]) + packet[at + 1 :]


def assert_same_sketches(found: OwnReceiver, expected: OwnReceiver, batches: tuple[int, ...]) -> None:
    """Compares sketches with each other and with those of the columns, before and after each batch is released."""
    by_columns = expected.sketch()
    assert (by_columns is None) == (not expected.layout.plan.sparse)
    if by_columns is not None:
        by_columns = Sketch.of_plan(expected.layout.plan, by_columns.shape)
        for batch in batches:
            by_columns.add(expected.layout.plan, expected.batch(batch))
    for released in (None, *batches):  # the counts of released batches stay
        for receiver in (expected, found):
            if released is not None:
                receiver.release(released)
            sketch = receiver.sketch()
            assert (sketch is None) == (by_columns is None)
            if sketch is not None and by_columns is not None:
                assert sketch.rows == by_columns.rows
                assert_same_bits(sketch.counts, by_columns.counts, f"sketch, released up to {released}")


@pytest.mark.root
@pytest.mark.needs("bpf", "arena")
@pytest.mark.timeout(300)
# No shrinking, because each example compiles a program.
@examples(20, phases=[Phase.generate], suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(plan=plans(), content=st.integers(0, 1 << 32), shape=sketch_shapes())
def test_xdp_agrees_with_numpy(plan: FeaturePlan, content: int, shape: SketchShape) -> None:
    plan = split(plan).prefix  # without what XDP cannot do
    layout = BatchLayout(plan=plan, batch_rows=BATCH_ROWS, slots=2)
    with (
        HostReceiver(layout, session=SESSION, sketch=shape) as expected,
        XdpReceiver(layout, session=SESSION, udp_port=4800, sketch=shape, fragments=bool(content & 1)) as found,
    ):
        for packet in packets_of(plan, content):
            expected.deliver(packet)
            found.deliver(packet)
        assert found.counters() == expected.counters()
        for verdict, count in expected.counters().datagrams.items():
            if count:
                event(verdict.name)
        assert expected.counters().datagrams[Verdict.ACCEPTED] > 0
        for batch in (0, 1):
            assert found.rows_taken(batch) == expected.rows_taken(batch)
            assert_same_batch(found.batch(batch), expected.batch(batch))
        assert_same_sketches(found, expected, batches=(0, 1))


@pytest.mark.timeout(300)
@examples(50, suppress_health_check=list(HealthCheck))
@given(plan=plans(), content=st.integers(0, 1 << 32), shape=sketch_shapes())
def test_the_native_receiver_agrees_with_numpy(plan: FeaturePlan, content: int, shape: SketchShape) -> None:
    """After each packet, verdict and state equal those of the reference."""
    layout = BatchLayout(plan=plan, batch_rows=BATCH_ROWS, slots=2)
    with (
        HostReceiver(layout, session=SESSION, sketch=shape) as expected,
        CpuReceiver(layout, session=SESSION, sketch=shape) as found,
    ):
        for packet in packets_of(plan, content):
            expected.deliver(packet)
            found.deliver(packet)
            assert found.counters() == expected.counters()
            for batch in (0, 1, 2):
                assert found.rows_taken(batch) == expected.rows_taken(batch)
                assert found.row_ahead(batch) == expected.row_ahead(batch)
        for verdict, count in expected.counters().datagrams.items():
            if count:
                event(verdict.name)
        for batch in (0, 1):
            assert_same_batch(found.batch(batch), expected.batch(batch))
        assert_same_sketches(found, expected, batches=(0, 1))


@pytest.mark.timeout(300)
@examples(40, suppress_health_check=list(HealthCheck))
@given(plan=plans(), content=st.integers(0, 1 << 32), rows=st.integers(0, 40))
def test_the_native_core_agrees_with_numpy(plan: FeaturePlan, content: int, rows: int) -> None:
    """Compares every column of the plan, also intermediate ones."""
    given_rows = random_rows(plan.schema, rows, np.random.default_rng(content))
    outputs = tuple(plan.graph.types)
    found = NativeTransform(plan.graph, outputs)(given_rows.columns)
    expected = evaluate(plan.graph, given_rows.columns, outputs)
    assert found.keys() == expected.keys()
    for name, column in expected.items():
        assert_same_column(found[name], column, name)


def test_every_target_makes_the_same_batch(rng: np.random.Generator) -> None:
    plan = FeaturePlan(
        schema=Schema(dense=(Dense(name="d"),), ids=(Ids(name="s", length=4, is_list=True), Ids(name="t"))),
        columns={"f": FirstX(column="s", count=2), "h": SigridHash(column="f", salt=1, max_value=7)},
        dense=("d", "d"),
        sparse=(Sparse(column="h", rows=7), Sparse(column="t")),
        keep=(Sample(fraction=0.5, seed=3),),
    )
    layout = BatchLayout(plan=plan, batch_rows=BATCH_ROWS)
    records = encode_records(plan.schema, random_rows(plan.schema, BATCH_ROWS, rng))
    packets = encode_packets(plan.schema, records, session=1, batch=0, body_max_bytes=200)
    batches = []
    targets = [target for target in Target if target is not Target.XDP or not capabilities.missing("root", "arena")]
    for target in targets:
        with compile_plan(layout, target, session=1, udp_port=4800) as receiver:
            for packet in packets:
                receiver.deliver(packet)
            found = receiver.batch(0)
            assert receiver.rows_taken(0) == BATCH_ROWS
            assert 0 < len(found.labels) < BATCH_ROWS
            batches.append(found)
            assert_same_batch(found, batches[0])


def test_the_native_core_refuses_what_does_not_fit() -> None:
    program = Program()
    ids, dense = program.ids_source(), program.dense_source()
    last = program.first_x(ids, 1)
    floats, lengths, values = np.zeros(2, np.float32), np.array([1, 2], np.int32), np.zeros(3, np.int64)
    with pytest.raises(ValueError, match="column 9; there are 3"):
        program.first_x(9, 1)
    with pytest.raises(ValueError, match="sources come before steps"):
        program.ids_source()
    wrong: list[tuple[list[Any], str]] = [
        ([(lengths, values)], "1 sources; the program has 2"),
        ([(lengths, values[:2]), floats], "lengths of 3 ids in all, but there are 2"),
        ([(np.array([4, -1], np.int32), values), floats], "negative length"),
        ([(lengths, values), floats[:1]], "different numbers of rows"),
    ]
    for sources, message in wrong:
        with pytest.raises(ValueError, match=message):
            program.run(sources, [last, dense])


def test_columns_may_end_in_another_thread() -> None:
    program = Program()
    made = program.clamp(program.dense_source(), 0.0, 1.0)
    columns = program.run([np.full(9, 7.0, np.float32)], [made])
    thread = threading.Thread(target=columns.clear)
    thread.start()
    thread.join(30)
    assert not columns


@examples(15, suppress_health_check=list(HealthCheck))
@given(plan=plans(), content=st.integers(0, 1 << 32), choice=st.randoms(use_true_random=False))
def test_the_halves_of_a_plan_make_what_the_whole_makes(plan: FeaturePlan, content: int, choice: random.Random) -> None:
    on_cpu = [name for name in plan.columns if choice.random() < 0.5]
    halves = split(plan, on_cpu=on_cpu)
    rows = random_rows(plan.schema, BATCH_ROWS, np.random.default_rng(content))
    expected = evaluate(plan.graph, rows.columns, plan.outputs)
    found = dict(evaluate(halves.prefix.graph, rows.columns, halves.prefix.outputs))
    if halves.rest is not None:
        made = tuple(name for name in plan.outputs if name in halves.rest.columns)
        assert not set(made) & set(halves.prefix.outputs)
        found |= NativeTransform(halves.rest, made)(found)
    for name in plan.outputs:
        assert_same_column(found[name], expected[name], name)
