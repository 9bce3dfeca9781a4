# SPDX-License-Identifier: Apache-2.0
"""Sharded tables in files and as tensor trains: the same bits as in memory, in every world and placement."""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from sennit.runtime.memory.cache import LOCATION_BYTES, NOTE_BYTES, WAYS
from sennit.runtime.memory.layout import RowPart, StoreLayout
from sennit.runtime.sharded.files import divided
from sennit.transport.errors import ConfigError

pytestmark = pytest.mark.timeout(180)

CASES = "sharded_cases.py"
STORES = "sharded_store_cases.py"
SHARDINGS = ("table_wise", "row_wise", "column_wise", "grid", "data_parallel")
MIXED = {"user": "row_wise", "item": "data_parallel", "genre": "column_wise", "city": "table_wise"}
HOMES = {"user": "file", "item": "dram", "genre": "dram"}
"""And `city` in a file, because there is a store."""
MEMORY_BYTES = 200_000
"""Too little for all rows on one rank, enough for three batches."""


@pytest.fixture(scope="module", params=["bags", "weighted", "sequences"])
def in_memory(request: pytest.FixtureRequest, kept_world: Callable[..., Any]) -> tuple[str, list[Any]]:
    """A kind of module, and what one rank has with all tables in memory."""
    return request.param, kept_world(1).run(CASES, "trained", placement="table_wise", kind=request.param)[0]


@pytest.fixture(scope="module", params=["bags", "weighted", "sequences"])
def with_trains(request: pytest.FixtureRequest, kept_world: Callable[..., Any]) -> tuple[str, list[Any]]:
    """The same where two tables are tensor trains."""
    arguments = {"placement": "table_wise", "kind": request.param, "trains": True}
    return request.param, kept_world(1).run(CASES, "trained", **arguments)[0]


def check(found: list[Any], digest: str, outputs: list[Any]) -> None:
    assert [one for one, _ in found] == [digest] * len(found)
    assert [sample for _, samples in found for sample in samples] == outputs


RANKS_AND_AHEAD = ((1, 0), (1, 2), (2, 1), (3, 1))
IN_FILES = [
    *((*ranks_and_ahead, placement, None) for ranks_and_ahead in RANKS_AND_AHEAD for placement in (*SHARDINGS, MIXED)),
    (1, 0, "row_wise", HOMES),
    (2, 1, MIXED, HOMES),
]


@pytest.mark.parametrize(("world", "ahead", "placement", "homes"), IN_FILES, ids=str)
def test_files_have_the_bits_of_memory(
    kept_world: Callable[..., Any],
    in_memory: tuple[str, list[Any]],
    tmp_path: Path,
    world: int,
    ahead: int,
    placement: Any,
    homes: dict[str, str] | None,
) -> None:
    """With `homes` some tables are in memory."""
    kind, alone = in_memory
    arguments = {"placement": placement, "kind": kind, "ahead": ahead, "folder": str(tmp_path), "homes": homes}
    check(kept_world(world).run(CASES, "trained", memory_bytes=MEMORY_BYTES, **arguments), *alone)


def test_a_home_that_cannot_be_is_refused_by_name(kept_world: Callable[..., Any], tmp_path: Path) -> None:
    kept_world(2).run(STORES, "homeless", folder=str(tmp_path))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("homes", [None, HOMES, dict.fromkeys(MIXED, "dram")], ids=["files", "some", "memory"])
def test_shards_move_there_and_back(
    kept_world: Callable[..., Any], tmp_path: Path, homes: dict[str, str] | None
) -> None:
    """Also out of files, where a table is replicated for a while."""
    kept_world(2).run(STORES, "moves", folder=str(tmp_path), homes=homes)


@pytest.mark.parametrize(("placement", "then"), [("row_wise", MIXED), (MIXED, "grid")], ids=str)
def test_shards_in_files_move_and_no_bit_changes(
    kept_world: Callable[..., Any], in_memory: tuple[str, list[Any]], tmp_path: Path, placement: Any, then: Any
) -> None:
    kind, alone = in_memory
    arguments = {"placement": placement, "then": then, "kind": kind, "folder": str(tmp_path)}
    check(kept_world(3).run(CASES, "trained", memory_bytes=MEMORY_BYTES, **arguments), *alone)


@pytest.mark.parametrize("is_stored", [False, True])
@pytest.mark.parametrize("placement", ["table_wise", "data_parallel", MIXED], ids=str)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_tensor_trains_have_the_same_bits_in_every_world(
    kept_world: Callable[..., Any],
    with_trains: tuple[str, list[Any]],
    tmp_path: Path,
    world: int,
    placement: Any,
    is_stored: bool,
) -> None:
    """Trains stay in memory where other tables are in files."""
    kind, alone = with_trains
    arguments = {"placement": placement, "kind": kind, "trains": True}
    if is_stored:
        arguments |= {"folder": str(tmp_path), "memory_bytes": MEMORY_BYTES, "ahead": 1}
    check(kept_world(world).run(CASES, "trained", **arguments), *alone)


@pytest.mark.parametrize("kind", ["bags", "weighted", "sequences"])
def test_backward_passes_accumulate_over_files(kept_world: Callable[..., Any], tmp_path: Path, kind: str) -> None:
    """Rows of all passes of a step stay in memory until it is taken."""
    arguments = {"placement": "row_wise", "kind": kind, "passes": 2}
    alone = kept_world(1).run(CASES, "trained", **arguments)[0]
    for world in (1, 2):
        found = kept_world(world).run(
            CASES, "trained", folder=str(tmp_path), memory_bytes=MEMORY_BYTES, ahead=1, **arguments
        )
        check(found, *alone)


@pytest.mark.parametrize(
    ("writer", "reader", "homes"),
    [(None, None, None), (None, "rows", None), ("rows", None, None), ("rows", "rows", None), ("rows", "rows", HOMES)],
    ids=str,
)
def test_checkpoints_are_the_same_from_files_and_from_memory(
    kept_world: Callable[..., Any], tmp_path: Path, writer: str | None, reader: str | None, homes: dict[str, str] | None
) -> None:
    """With `homes` the reader has other tables in files than the writer."""
    (tmp_path / "rows").mkdir()
    arguments = {"folder": str(tmp_path), "checkpoint": str(tmp_path / "saved")}
    written = kept_world(2).run(STORES, "saved", rows=writer, **arguments)
    for world in (1, 2, 3):
        assert set(kept_world(world).run(STORES, "resumed", rows=reader, homes=homes, **arguments)) == set(written)
    assert not list((tmp_path / "rows").iterdir())


def test_initial_rows_do_not_depend_on_how_files_are_filled(kept_world: Callable[..., Any], tmp_path: Path) -> None:
    """A file is filled in pieces of 65,536 rows, values are drawn in blocks of 4,096."""
    (digests,) = kept_world(1).run(STORES, "initial", folder=str(tmp_path))
    assert digests[0] == digests[1]


def test_changed_rows_are_those_of_memory(kept_world: Callable[..., Any], tmp_path: Path) -> None:
    kept_world(1).run(STORES, "changes", folder=str(tmp_path))


def test_wrong_use_is_refused_and_forgotten_batches_hold_nothing(
    kept_world: Callable[..., Any], tmp_path: Path
) -> None:
    kept_world(2).run(STORES, "misused", folder=str(tmp_path))


def test_files_of_killed_runs_are_replaced_and_those_in_use_are_not(
    kept_world: Callable[..., Any], tmp_path: Path
) -> None:
    left = tmp_path / "rows-0-0.unfinished"
    left.write_bytes(bytes(1 << 16))
    with left.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        (told,) = kept_world(1).run(STORES, "error", folder=str(tmp_path))
        assert told.startswith(f"DeviceError: {left}: of another run")
        assert left.stat().st_size == 1 << 16
    assert kept_world(1).run(STORES, "error", folder=str(tmp_path)) == ["no error"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("when", ["filling", "in use"])
def test_a_killed_run_leaves_nothing_in_the_way(new_world: Any, tmp_path: Path, when: str) -> None:
    assert new_world(1).run(STORES, "killed", folder=str(tmp_path), when=when) == [None]
    names = [file.name for file in tmp_path.iterdir()]
    assert names == (["rows-0-0.unfinished"] if when == "filling" else [])
    assert new_world(1).run(STORES, "error", folder=str(tmp_path)) == ["no error"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"memory_bytes": 1000}, "ConfigError: 1000 bytes of memory for 5000 rows in 1 files; allowed: 20980 or more"),
        (
            {"memory_bytes": 23_000},
            "ConfigError: rank 0 has 23000 B of memory for rows: user/0.0 (800 rows): a batch needs 800",
        ),
        ({"file_limit_bytes": 100_000}, "DeviceError: "),
        ({"copy_limit_bytes": 10_000}, "DeviceError: "),
    ],
    ids=str,
)
def test_mistakes_are_told(new_world: Any, tmp_path: Path, settings: dict[str, int], message: str) -> None:
    (told,) = new_world(1).run(STORES, "error", folder=str(tmp_path), **settings)
    assert told.startswith(message)
    assert str(tmp_path) in told or told.startswith("ConfigError")
    assert not list(tmp_path.iterdir())


def test_a_full_disk_of_one_rank_is_told_on_all(new_world: Any, tmp_path: Path) -> None:
    told = new_world(2).run(STORES, "error", folder=str(tmp_path), limited_rank=1, file_limit_bytes=100_000)
    assert told[1].startswith(f"DeviceError: {tmp_path}")
    assert told[0] == f"SennitError: rank 1 could not make its table store: {told[1]}"


@pytest.mark.parametrize("ahead", [None, 0, 1, 2])
def test_a_batch_that_does_not_fit_one_rank_is_told_on_all_and_changes_nothing(
    kept_world: Callable[..., Any], tmp_path: Path, ahead: int | None
) -> None:
    """Later batches train on, with the bits of a run that has never had the large ones."""
    ((digest, expected),) = kept_world(1).run(STORES, "unfit", folder=None, ahead=0)
    found = kept_world(2).run(STORES, "unfit", folder=str(tmp_path), ahead=ahead)
    assert [one for one, _ in found] == [digest] * 2
    (told, same) = (messages for _, messages in found)
    assert told == same
    assert len(told) == len(expected) == 2
    assert all(message.startswith(start) for message, start in zip(told, expected, strict=True))


def test_a_disk_that_fails_on_one_rank_is_told_on_all(new_world: Any, tmp_path: Path) -> None:
    """At the next batch, and at those after it: nobody waits for that rank."""
    others, own = new_world(2).run(STORES, "broken", folder=str(tmp_path))
    assert own == own[:1] * 2
    assert own[0].startswith(("CorruptStore: ", "DeviceError: "))
    assert others == [f"SennitError: rank 1 could not read rows: {text}" for text in own]


def layout(name: str, rows: int, columns: int) -> StoreLayout:
    return StoreLayout(tables=((name, rows),), parts=(RowPart(name="weight", columns=columns),))


@pytest.mark.parametrize("memory_bytes", [70_000, 200_000, 1_000_000])
def test_memory_is_not_exceeded_and_divided_by_bytes(memory_bytes: int) -> None:
    layouts = [layout("small", 10, 4), layout("large", 10_000, 16), layout("medium", 1_000, 16)]
    found = divided(memory_bytes, layouts)
    taken = [
        sum(lines) * (one.row_bytes + NOTE_BYTES) + one.row_count * LOCATION_BYTES
        for one, lines in zip(layouts, found, strict=True)
    ]
    assert memory_bytes - 200 < sum(taken) <= memory_bytes
    assert all(lines % WAYS == 0 and lines >= WAYS and spare >= (lines + spare) // 16 for lines, spare in found)
    assert sum(found[0]) == 2 * WAYS  # All rows of the small table fit.
    assert divided(1 << 40, layouts)[1] == (18_720, 1_280)
    with pytest.raises(ConfigError, match="1000 bytes of memory for 11010 rows in 3 files; allowed: 5"):
        divided(1000, layouts)
