# SPDX-License-Identifier: Apache-2.0
"""The cost benchmark: what a turn costs, the plain Python ingest beside the reference, and a small run."""

from __future__ import annotations

import random
import sys
from types import FrameType
from typing import Any

import numpy as np
import pytest

from sennit.offload.admission import Verdict
from sennit.offload.batches import BatchLayout
from sennit.offload.errors import TargetUnavailable
from sennit.offload.host_receiver import HostReceiver
from sennit.offload.records import HEADER, encode_packets, encode_records
from sennit.offload.schema import Dense, Ids, LabelKind, Schema
from sennit.testbed.bench.samples.offload import rows_of, shapes
from sennit.testbed.bench.samples.python_receiver import PythonReceiver, record_of
from sennit.testbed.bench.training import cost as bench
from sennit.testbed.bench.training.cost_ways import Measured, turn_order
from tests.offload.agreement import assert_same_batch

SESSION = 7
ROWS = 64
PLAN = shapes()["26 ids modulo, 13 clamped"]


@pytest.fixture
def datagrams(rng: np.random.Generator) -> list[bytes]:
    """Of batch 0."""
    records = encode_records(PLAN.schema, rows_of(PLAN.schema, ROWS, rng))
    return encode_packets(PLAN.schema, records, session=SESSION, batch=0, body_max_bytes=1000)


@pytest.fixture
def layout() -> BatchLayout:
    return BatchLayout(plan=PLAN, batch_rows=ROWS)


def test_the_python_ingest_makes_the_reference_s_batches(datagrams: list[bytes], layout: BatchLayout) -> None:
    with (
        PythonReceiver(layout, session=SESSION, address="127.0.0.1", port=0) as python,
        HostReceiver(layout, session=SESSION, sketch=None) as reference,
    ):
        for datagram in datagrams:
            python.deliver(datagram)
            reference.deliver(datagram)
        assert python.rows_taken(0) == ROWS
        assert_same_batch(python.batch(0), reference.batch(0))
        assert python.counters() == reference.counters()
        python.release(0)
        assert (python.rows_taken(0), python.rows_taken(4)) == (0, 0)
        python.deliver(datagrams[0])
        assert python.counters().datagrams[Verdict.DUPLICATE] == 1


def test_a_late_packet_is_no_row_of_the_next_batch_wherever_the_release_is(
    datagrams: list[bytes], layout: BatchLayout
) -> None:
    """The receiving thread takes a duplicate before each line of `release`."""
    with PythonReceiver(layout, session=SESSION, address="127.0.0.1", port=0) as python:
        for datagram in datagrams:
            python.deliver(datagram)

        def at_line(frame: FrameType, event: str, argument: object) -> Any:
            if event == "line":
                python.deliver(datagrams[0])
            return at_line

        def at_call(frame: FrameType, event: str, argument: object) -> Any:
            return at_line if frame.f_code is PythonReceiver.release.__code__ else None

        before = sys.gettrace()
        sys.settrace(at_call)
        python.release(0)
        sys.settrace(before)
        assert python.rows_taken(4) == 0
        assert python.counters().datagrams[Verdict.DUPLICATE] >= 2


def test_it_refuses_what_the_reference_refuses(
    datagrams: list[bytes], layout: BatchLayout, rng: np.random.Generator
) -> None:
    """Truncations, changed bytes and packets out of turn, between good ones."""
    chance = random.Random(int(rng.integers(1 << 31)))
    sent: list[bytes] = []
    for datagram in datagrams:
        broken = bytearray(datagram)
        broken[chance.randrange(HEADER.size)] ^= 1 << chance.randrange(8)
        sent += [datagram[: chance.randrange(len(datagram))], bytes(broken), datagrams[-1], datagram + b"x", datagram]
    sent += [datagrams[0][:length] for length in range(HEADER.size + 1)]
    with (
        PythonReceiver(layout, session=SESSION, address="::1", port=0) as python,
        HostReceiver(layout, session=SESSION, sketch=None) as reference,
    ):
        for number, datagram in enumerate(sent):
            python.deliver(memoryview(datagram))
            reference.deliver(datagram)
            assert python.counters() == reference.counters(), (number, datagram[: HEADER.size])
            assert (python.rows_taken(0), python.row_ahead(0)) == (reference.rows_taken(0), reference.row_ahead(0))


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        (Schema(ids=(Ids(name="t", length=3, is_list=True),)), "lists"),
        (Schema(dense=(Dense(name="d"),), label=LabelKind.FLOAT32), "labels that are numbers"),
    ],
    ids=["lists", "labels"],
)
def test_it_takes_records_of_one_size(schema: Schema, reason: str) -> None:
    with pytest.raises(TargetUnavailable, match=reason):
        record_of(schema)


def measured(seconds: list[float], bpf: list[float], *, feeder: float = 0.0, moved: int = 0) -> Measured:
    return Measured(
        processor_s=seconds,
        feeder_s=[feeder] * len(seconds),
        roles_s=[{"trainer": one - feeder, "bpf": extra} for one, extra in zip(seconds, bpf, strict=True)],
        samples=1_000,
        moved_bytes=moved,
    )


def test_figures_are_medians_of_turns_with_bpf_added() -> None:
    settings = bench.Settings(kind="bare")
    ours, theirs = (way.name for way in settings.ways[:2])
    report = bench.Report(
        settings=settings,
        machine={"processor": "one"},
        ways={
            ours: measured([0.001, 0.002, 0.009], [0.001, 0.001, 0.001], feeder=0.0005, moved=1_000_000),
            theirs: measured([0.01, 0.02, 0.03], [0.0] * 3),
            settings.ways[2].name: Measured(
                processor_s=[], feeder_s=[], roles_s=[], samples=0, moved_bytes=0, absent="not installed"
            ),
        },
    )
    assert report.processor_s(ours) == pytest.approx(3.0)
    assert report.ratio(ours, theirs) == pytest.approx([0.2, 0.15, 1 / 3])
    assert report.roles(ours) == pytest.approx({"trainer": 1.5, "bpf": 1.0, "feeder": 0.5})
    # 1,000 samples move a MB: a GB is a million samples.
    assert report.per_gb(ours) == pytest.approx(3.0)
    assert report.per_gb(theirs) == pytest.approx(20.0)
    told = report.as_json()
    assert told["absent"] == {settings.ways[2].name: "not installed"}
    assert set(told["processor_s_per_million_samples"]) == {ours, theirs}


def test_every_way_has_its_turn_in_every_round_and_begins_as_often_as_others() -> None:
    order = turn_order(3, 6)
    rounds = [order[begin : begin + 3] for begin in range(0, 18, 3)]
    assert all(sorted(one) == [0, 1, 2] for one in rounds)
    assert [one[0] for one in rounds] == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize("wrong", [{"ranks": 3}, {"batch_size": 1_001}, {"kind": "half"}])
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="allowed"):
        bench.Settings(**wrong)  # type: ignore[arg-type]


@pytest.mark.root
@pytest.mark.long
@pytest.mark.needs("netns", "bpf", "arena", "native-xdp")
@pytest.mark.timeout(180)
def test_small_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ingest and exchange alone, with XDP and with Python."""
    ways = bench.BARE[:2]
    monkeypatch.setitem(bench.KINDS, "bare", ways)
    settings = bench.Settings(
        kind="bare", data="synthetic", ranks=1, samples=2_000, batch_size=256, dim=8, steps=1, rounds=1
    )
    report = bench.run(settings)
    xdp, python = (report.ways[way.name] for way in ways)
    assert not any(way.absent for way in report.ways.values())
    assert all(len(way.processor_s) == 1 for way in report.ways.values())
    assert xdp.roles_s[0]["bpf"] > 0
    assert python.roles_s[0]["ingest"] > 0
    assert all(way.feeder_s[0] > 0 for way in report.ways.values())
