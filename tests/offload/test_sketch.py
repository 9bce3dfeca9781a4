# SPDX-License-Identifier: Apache-2.0
"""The sketch of ids: the error of its estimates, refused parameters, and that no count is lost."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sennit.offload import sketch as module
from sennit.offload.batches import Batch, BatchLayout
from sennit.offload.errors import SketchError
from sennit.offload.host_receiver import HostReceiver
from sennit.offload.plan import FeaturePlan, Sparse
from sennit.offload.records import encode_packets, encode_records
from sennit.offload.schema import Ids, Schema
from sennit.offload.sketch import Sketch, SketchShape, sampled_rows
from sennit.offload.xdp import XdpReceiver
from tests.offload.strategies import random_rows, sketch_shapes

TABLE_ROWS = 5000
PLAN = FeaturePlan(
    schema=Schema(ids=(Ids(name="user", width_bytes=2, signed=False), Ids(name="seen", length=9, is_list=True))),
    sparse=(Sparse(column="user", rows=1 << 16), Sparse(column="seen")),
)


def zipf_ids(rng: np.random.Generator, count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Draws rows of a table, the first ones far more often than the others."""
    weights = 1 / np.arange(1, TABLE_ROWS + 1)
    return rng.choice(TABLE_ROWS, count, p=weights / weights.sum())


def sketch_of(shape: SketchShape, ids: np.ndarray[Any, np.dtype[np.int64]]) -> Sketch:
    made = Sketch(tables=["t"], table_rows=[TABLE_ROWS], shape=shape)
    made.add_sampled([ids])
    made.rows = len(ids)
    return made


@given(ids=st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=60), shape=sketch_shapes())
def test_no_estimate_is_below_the_sampled_count(ids: list[int], shape: SketchShape) -> None:
    given_ids = np.array(ids, np.int64)
    distinct, counts = np.unique(given_ids, return_counts=True)
    made = sketch_of(shape, given_ids)
    assert np.all(made.estimate("t", distinct) >= counts * shape.one_row_in)
    assert made.ids_sampled("t") == len(ids)


def test_estimates_exceed_the_count_no_more_often_than_the_bound_says(rng: np.random.Generator) -> None:
    ids = zipf_ids(rng, 200_000)
    counts = np.bincount(ids, minlength=TABLE_ROWS)
    for depth in (1, 2, 4):
        shape = SketchShape(width=512, depth=depth, one_row_in=1)
        excess = sketch_of(shape, ids).estimate("t", np.arange(TABLE_ROWS)).astype(np.int64) - counts
        assert np.mean(excess > math.e * len(ids) / shape.width) <= math.exp(-depth)


@given(batch=st.integers(0, (1 << 32) - 1), rows=st.integers(0, 700), shift=st.integers(0, 8))
def test_one_row_of_each_stratum_is_sampled(batch: int, rows: int, shift: int) -> None:
    one_row_in = 1 << shift
    found = sampled_rows(batch, rows, one_row_in)
    strata = found // one_row_in
    assert np.array_equal(strata, np.unique(strata))
    assert rows // one_row_in <= len(found) <= -(-rows // one_row_in)
    assert not len(found) or found[-1] < rows
    # A longer batch has the same first rows, because sampling needs no look ahead.
    longer = sampled_rows(batch, rows + one_row_in, one_row_in)
    assert np.array_equal(longer[longer < rows], found)


def test_sampled_estimates_are_near_the_counts(rng: np.random.Generator) -> None:
    plan = FeaturePlan(schema=Schema(ids=(Ids(name="t"),)), sparse=(Sparse(column="t", rows=None),))
    made = Sketch(tables=["t"], table_rows=[TABLE_ROWS], shape=SketchShape())
    rows = 1 << 14
    ids = zipf_ids(rng, 40 * rows)
    for number, values in enumerate(ids.reshape(-1, rows)):
        empty = np.zeros((rows, 0), np.float32)
        made.add(
            plan,
            Batch(
                number=number, labels=empty[:, :0].sum(1), dense=empty, lengths=np.ones((1, rows), np.int32),
                values=(values,),
            ),
        )  # fmt: skip
    assert made.rows == len(ids)
    counts = np.bincount(ids, minlength=TABLE_ROWS)
    hot, estimates = made.hot_rows("t", 20)
    # Six standard deviations of sampling, plus the error of the sketch.
    allowed = 6 * np.sqrt(counts[hot] * made.shape.one_row_in) + math.e * len(ids) / made.shape.width
    assert np.all(np.abs(estimates.astype(np.int64) - counts[hot]) <= allowed)
    assert set(hot[:5]) <= set(range(8))


def test_hot_rows_are_in_order_and_only_those_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    made = sketch_of(SketchShape(one_row_in=2), np.repeat([4999, 7, 9, 3, 0], [5, 1, 3, 3, 2]))
    for chunk in (1 << 20, 1000, 4, 1):
        monkeypatch.setattr(module, "_CHUNK_ROWS", chunk)
        rows, estimates = made.hot_rows("t", 4)
        assert rows.tolist() == [4999, 3, 9, 0]
        assert estimates.tolist() == [10, 6, 6, 4]
        if chunk >= 1000:
            assert len(made.hot_rows("t", 100)[0]) == 5


@given(shape=sketch_shapes(), ids=st.lists(st.integers(0, 50), max_size=40), cut=st.integers(0, 40))
def test_merging_is_counting_all_in_one(shape: SketchShape, ids: list[int], cut: int) -> None:
    whole, left, right = (sketch_of(shape, np.array(part, np.int64)) for part in (ids, ids[:cut], ids[cut:]))
    left.merge(right)
    assert np.array_equal(left.counts, whole.counts)
    assert left.rows == whole.rows


def test_a_file_has_all_of_it(tmp_path: Path) -> None:
    made = Sketch.of_plan(PLAN, SketchShape(width=64, depth=3, one_row_in=8))
    made.add_sampled([np.array([1, 2]), np.array([-5, 1 << 62, 2])])
    made.rows = 17
    made.save(tmp_path / "ids.sketch")
    found = Sketch.load(tmp_path / "ids.sketch")
    assert (found.tables, found.table_rows, found.shape, found.rows) == (
        ("user", "seen"), (1 << 16, None), made.shape, 17,
    )  # fmt: skip
    assert np.array_equal(found.counts, made.counts)
    assert found.estimate("seen", np.array([-5, 3])).tolist() == [8, 0]


def test_what_is_no_sketch_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file.npz"
    made = sketch_of(SketchShape(width=16), np.array([1]))
    made.save(file)
    whole = file.read_bytes()
    fields = dict(np.load(file))
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"version": np.array(2)}, "version 2; allowed: 1"),
        ({"counts": np.zeros((1, 4, 15), np.uint64)}, "width 15"),
        ({"counts": np.zeros((2, 4, 16), np.uint64)}, "of 1 tables"),
        ({"counts": np.zeros(3)}, "no sketch"),
    ]
    for changed, message in wrong:
        np.savez(file, **{**fields, **changed})
        with pytest.raises(SketchError, match=message):
            Sketch.load(file)
    for content in (b"", b"PK", whole[: len(whole) // 2], b"x" * 100):
        file.write_bytes(content)
        with pytest.raises(SketchError, match="no sketch"):
            Sketch.load(file)


def test_what_cannot_be_asked_is_named() -> None:
    for shape, message in (
        ({"width": 3}, "width 3; allowed: powers of two from 1 to 65536"),
        ({"depth": 5}, "depth 5; allowed: 1 to 4"),
        ({"one_row_in": 0}, "one_row_in 0; allowed"),
    ):
        with pytest.raises(SketchError, match=message):
            SketchShape(**shape)
    made = Sketch.of_plan(PLAN, SketchShape())
    with pytest.raises(SketchError, match="'seen': the plan does not say how many rows"):
        made.hot_rows("seen", 3)
    with pytest.raises(SketchError, match="no table 'x'; known are user, seen"):
        made.estimate("x", np.array([1]))
    with pytest.raises(SketchError, match="0 hottest rows"):
        made.hot_rows("user", 0)
    with pytest.raises(SketchError, match="cannot be merged"):
        made.merge(Sketch.of_plan(PLAN, SketchShape(depth=3)))


@pytest.mark.root
@pytest.mark.needs("bpf", "arena")
@pytest.mark.parametrize("until_full", [1, 2, 1 << 30])
def test_cells_are_moved_before_they_overflow(until_full: int, rng: np.random.Generator) -> None:
    layout = BatchLayout(plan=PLAN, batch_rows=64, slots=2)
    shape = SketchShape(width=32, one_row_in=4)
    with (
        XdpReceiver(layout, session=1, udp_port=4800, sketch=shape) as receiver,
        HostReceiver(layout, session=1, sketch=shape) as reference,
    ):
        assert receiver.sketches is not None
        # 16 rows of a batch with at most 9 ids each.
        assert receiver.sketches.batches_until_full == ((1 << 32) - 1) // (16 * 9)
        receiver.sketches.batches_until_full = until_full
        for batch in range(6):
            records = encode_records(PLAN.schema, random_rows(PLAN.schema, 64, rng))
            for packet in encode_packets(PLAN.schema, records, session=1, batch=batch, body_max_bytes=700):
                for target in (receiver, reference):
                    target.deliver(packet)
            for target in (receiver, reference):
                target.release(batch)
            found, expected = receiver.sketch(), reference.sketch()
            assert found is not None
            assert expected is not None
            assert found.rows == expected.rows == 64 * (batch + 1)
            assert np.array_equal(found.counts, expected.counts)
