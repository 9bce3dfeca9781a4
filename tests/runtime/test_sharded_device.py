# SPDX-License-Identifier: Apache-2.0
"""Sharded tables on a device: the bits of tables on the CPU.

Without a GPU there are two halves: `device_double` finds operations that mix devices, and Triton's interpreter runs the
kernels. The tests marked `gpu` run both at once.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

pytestmark = pytest.mark.timeout(180)

CASES = "sharded_device_cases.py"
MIXED = {"user": "row_wise", "item": "data_parallel", "genre": "column_wise", "city": "table_wise"}
CODED = {"user": "column_wise", "item": "table_wise", "genre": "data_parallel"}
KINDS = ("bags", "weighted", "sequences")


@pytest.fixture(scope="module", params=KINDS)
def alone(request: pytest.FixtureRequest, kept_world: Callable[..., Any]) -> tuple[str, list[Any]]:
    """A kind of module, and what one rank has with all tables on the CPU."""
    arguments = {"placement": "table_wise", "kind": request.param}
    return request.param, kept_world(1).run("sharded_cases.py", "trained", **arguments)[0]


@pytest.mark.parametrize("placement", ["row_wise", "grid", MIXED], ids=str)
@pytest.mark.parametrize(("world", "ids_there"), [(2, True), (3, False)])
def test_nothing_mixes_devices(
    kept_world: Callable[..., Any], alone: tuple[str, list[Any]], world: int, ids_there: bool, placement: Any
) -> None:
    kind, (digest, outputs) = alone
    arguments = {"placement": placement, "kind": kind, "ids_there": ids_there}
    found = kept_world(world).run(CASES, "trained_on_the_double", **arguments)
    assert [one for (one, _), _ in found] == [digest] * world
    assert [sample for (_, samples), _ in found for sample in samples] == outputs
    for _, waits in found:
        # In a step ids, lengths and weights are read once, if they are there; and the numbers of the rows of a
        # replicated table whose sums go to others.
        read = (3 if kind == "weighted" else 2) if ids_there else 0
        assert 4 * read <= sum(waits.values()) <= 4 * (read + (placement == MIXED)), waits


@pytest.mark.parametrize("kind", ["bags", "sequences"])
@pytest.mark.parametrize("codec", ["int8", "lossless"])
def test_what_travels_coded_has_the_same_bits(kept_world: Callable[..., Any], codec: str, kind: str) -> None:
    arguments = {"codec": codec, "kind": kind, "placement": CODED}
    wanted = kept_world(2).run("sharded_codec_cases.py", "coded", **arguments)
    assert [of_rank for of_rank, _ in kept_world(2).run(CASES, "coded_on_the_double", **arguments)] == [
        of_rank for of_rank, _ in wanted
    ]


def test_passes_are_one_step(kept_world: Callable[..., Any], alone: tuple[str, list[Any]]) -> None:
    kind, _ = alone
    arguments = {"placement": MIXED, "kind": kind, "passes": 2}
    wanted = kept_world(2).run("sharded_cases.py", "trained", **arguments)
    assert [one for one, _ in kept_world(2).run(CASES, "trained_on_the_double", **arguments)] == wanted


@pytest.mark.parametrize(("world", "ahead", "passes"), [(1, 2, 1), (2, 1, 1), (2, 1, 2)])
def test_rows_from_files_have_the_same_bits(
    kept_world: Callable[..., Any],
    alone: tuple[str, list[Any]],
    tmp_path: Path,
    world: int,
    ahead: int,
    passes: int,
) -> None:
    """On the device there are rows of a few batches only, in host memory of some more."""
    kind, (digest, outputs) = alone
    arguments = {"placement": MIXED if world > 1 else "row_wise", "kind": kind, "passes": passes}
    if passes > 1:
        ((digest, outputs),) = kept_world(1).run("sharded_cases.py", "trained", **arguments)
    memory = {"folder": str(tmp_path), "memory_bytes": 240_000, "device_bytes": 130_000 * passes}
    found = kept_world(world).run(CASES, "trained_on_the_double", ahead=ahead, **arguments, **memory)
    assert [one for (one, _), _ in found] == [digest] * world
    assert [sample for (_, samples), _ in found for sample in samples] == outputs


@pytest.mark.parametrize(("placement", "is_stored"), [("row_wise", False), (MIXED, True)], ids=str)
def test_some_tables_in_host_memory_have_the_same_bits(
    kept_world: Callable[..., Any], alone: tuple[str, list[Any]], tmp_path: Path, is_stored: bool, placement: Any
) -> None:
    """Two tables with one optimizer, and one of two features: results and gradients go between host and device."""
    kind, (digest, outputs) = alone
    arguments = {"placement": placement, "kind": kind, "homes": {"item": "dram", "genre": "dram", "city": "hbm"}}
    if is_stored:
        arguments |= {"folder": str(tmp_path), "memory_bytes": 240_000, "device_bytes": 130_000, "ahead": 1}
    found = kept_world(2).run(CASES, "trained_on_the_double", **arguments)
    assert [one for (one, _), _ in found] == [digest] * 2
    assert [sample for (_, samples), _ in found for sample in samples] == outputs


def test_a_checkpoint_is_read_with_other_homes(kept_world: Callable[..., Any]) -> None:
    kept_world(2).run(CASES, "loaded_elsewhere")


def test_rows_from_files_move(kept_world: Callable[..., Any], alone: tuple[str, list[Any]], tmp_path: Path) -> None:
    kind, (digest, outputs) = alone
    memory = {"folder": str(tmp_path), "memory_bytes": 240_000, "device_bytes": 130_000}
    arguments = {"placement": "row_wise", "then": MIXED, "kind": kind}
    found = kept_world(2).run(CASES, "trained_on_the_double", **arguments, **memory)
    assert [one for (one, _), _ in found] == [digest] * 2
    assert [sample for (_, samples), _ in found for sample in samples] == outputs


# The table of the kernels' cases has weights and bags, too.
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind == "sequences" else [pytest.mark.long]) for kind in KINDS]
)
def test_triton_has_the_bits_of_the_native_kernels(kept_world: Callable[..., Any], tmp_path: Path, kind: str) -> None:
    pytest.importorskip("triton")
    arguments = {"placement": MIXED, "kind": kind, "samples": 8, "steps": 1}
    wanted = kept_world(1).run("sharded_cases.py", "trained", **arguments)[0][0]
    found = kept_world(2).run(CASES, "trained_by_triton", device="cpu", **arguments)
    assert [digest for digest, _ in found] == [wanted] * 2
    # Lines of a cache are rounded by the numbers of their rows.
    stored = {"folder": str(tmp_path), "memory_bytes": 400_000}
    (found,) = kept_world(1).run(CASES, "trained_by_triton", device="cpu", **arguments, **stored)
    assert found[0] == wanted


@pytest.mark.gpu
@pytest.mark.parametrize("codec", ["int8", "lossless"])
def test_what_travels_coded_from_a_gpu(new_world: Callable[..., Any], codec: str) -> None:
    world, arguments = new_world(2), {"codec": codec, "placement": CODED}
    wanted = [digest for digest, _ in world.run("sharded_codec_cases.py", "coded", **arguments)]
    assert [digest for digest, _ in world.run(CASES, "coded_on_a_gpu", **arguments)] == wanted


@pytest.mark.gpu
@pytest.mark.parametrize("placement", ["table_wise", "row_wise", "grid", "data_parallel", MIXED], ids=str)
@pytest.mark.parametrize("ids_there", [False, True])
def test_on_a_gpu(
    new_world: Callable[..., Any], alone: tuple[str, list[Any]], tmp_path: Path, ids_there: bool, placement: Any
) -> None:
    kind, (digest, outputs) = alone
    arguments = {"placement": placement, "kind": kind, "ids_there": ids_there}
    memory = {"folder": str(tmp_path), "memory_bytes": 240_000, "device_bytes": 130_000, "ahead": 1}
    world = new_world(2)
    for more in ({}, memory):
        found = world.run(CASES, "trained_by_triton", device="cuda:0", **arguments, **more)
        assert [one for one, _ in found] == [digest] * 2
        assert [sample for _, samples in found for sample in samples] == outputs


def test_what_a_device_does_not_have_is_refused(kept_world: Callable[..., Any]) -> None:
    kept_world(2).run(CASES, "refused")


def test_rows_that_do_not_fit_the_device_of_one_rank_are_told_on_all(
    kept_world: Callable[..., Any], tmp_path: Path
) -> None:
    kept_world(2).run(CASES, "unfit_there", folder=str(tmp_path))


def test_a_device_that_one_rank_lacks_is_told_to_all(kept_world: Callable[..., Any]) -> None:
    kept_world(2).run(CASES, "missing_on_one_rank")
