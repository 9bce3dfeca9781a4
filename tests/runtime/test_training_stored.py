# SPDX-License-Identifier: Apache-2.0
"""Training with tables in a file: the bits of training in memory, checkpoints between the two, and errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sennit.offload.ingest.facts import TableFacts
from sennit.runtime.memory.cache import LOCATION_BYTES, NOTE_BYTES, WAYS
from sennit.runtime.memory.store import ROWS_AT_ONCE
from sennit.runtime.memory.tiered import layout_of
from sennit.runtime.model.embedding import ROW_WISE_ADAGRAD, embedding_engine, table_specs
from sennit.runtime.model.stored import InitialRows, lines_in

CASES = "stored_cases.py"
MEMORY_BYTES = 40 << 10


@pytest.mark.parametrize("size", [1, 2])
def test_weights_are_those_of_tables_in_memory(kept_world: Any, seed: int, tmp_path: Path, size: int) -> None:
    """Runs three epochs with an evaluation after each. Of two ranks, one has the largest table, the other the rest."""
    world = kept_world(size)
    memory = world.run(CASES, "train", seed=seed, steps=40)
    stored = world.run(CASES, "train", seed=seed, steps=40, folder=str(tmp_path), memory_bytes=MEMORY_BYTES)
    for name in ("losses", "auc", "sha256", "state"):
        assert [answer[name] for answer in stored] == [answer[name] for answer in memory]
    assert sum(answer["rows"]["evictions"] for answer in stored) > 100
    assert all(answer["rows"]["hits"] and answer["rows"]["misses"] for answer in stored)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("writer_is_stored", [True, False])
@pytest.mark.parametrize("reader_is_stored", [True, False])
def test_checkpoints_are_the_same_from_a_file_and_from_memory(
    kept_world: Any, seed: int, tmp_path: Path, writer_is_stored: bool, reader_is_stored: bool
) -> None:
    world = kept_world(1)
    arguments = {"seed": seed, "checkpoints": str(tmp_path / "saved"), "memory_bytes": MEMORY_BYTES}
    folder = tmp_path / "rows"
    folder.mkdir()
    place = {True: str(folder), False: None}
    written = world.run(CASES, "save_and_go_on", folder=place[writer_is_stored], **arguments)
    read = world.run(CASES, "resume_and_go_on", folder=place[reader_is_stored], **arguments)
    assert read == written
    assert not list(folder.iterdir())


def test_memory_is_not_exceeded_and_no_more_is_taken_than_helps() -> None:
    layout = layout_of(table_specs([TableFacts(name="ads", row_count=10_000, mean_length=1)], dim=15), ROW_WISE_ADAGRAD)
    line_bytes, locations_bytes = 64 + NOTE_BYTES, 10_000 * LOCATION_BYTES
    for memory_bytes in (50_000, 123_456, 800_000):
        lines, spares = lines_in(memory_bytes, layout)
        taken = (lines + spares) * line_bytes + locations_bytes
        assert memory_bytes - line_bytes < taken <= memory_bytes
        assert lines % WAYS == 0
        assert spares >= (lines + spares) // 16
    assert sum(lines_in(1 << 40, layout)) == 20_000


def test_initial_rows_are_those_in_memory_however_they_are_cut() -> None:
    tables = [
        TableFacts(name="small", row_count=10, mean_length=1),
        TableFacts(name="large", row_count=ROWS_AT_ONCE + 100, mean_length=1),
    ]
    engine = embedding_engine(tables, dim=3, seed=5)
    layout = layout_of(table_specs(tables, dim=3), ROW_WISE_ADAGRAD)
    rows = InitialRows(tables, layout, seed=5)
    cut = [rows(0, 5), rows(5, ROWS_AT_ONCE), rows(ROWS_AT_ONCE + 5, 105)]
    found = torch.from_numpy(np.concatenate([part["weight"] for part in cut]))
    assert torch.equal(found, torch.cat([engine.weight("small"), engine.weight("large")]))
    assert not any(part["sum"].any() for part in cut)


def test_a_file_left_by_a_killed_run_is_replaced_and_others_are_not(kept_world: Any, seed: int, tmp_path: Path) -> None:
    world = kept_world(1)
    arguments = {"seed": seed, "folder": str(tmp_path), "memory_bytes": MEMORY_BYTES}
    # This run is not closed: its file stays, locked by its process.
    assert world.run(CASES, "error", **arguments) == ["no error"]
    file = tmp_path / "rows-0"
    kept = file.read_bytes()
    file.unlink()
    file.write_bytes(kept)
    assert world.run(CASES, "error", **arguments) == ["no error"]
    file.unlink()
    file.write_bytes(bytes(1 << 20))
    (message,) = world.run(CASES, "error", **arguments)
    assert message.startswith(f"ForeignStore: {file}")
    assert file.read_bytes() == bytes(1 << 20)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"memory_bytes": 1000}, "ConfigError: 1000 bytes of memory for 6000 rows of 20 bytes; allowed: 25400 or more"),
        ({"memory_bytes": 26_000}, "ConfigError: 26000 B of memory for tables: all 32 lines of set"),
        ({"memory_bytes": MEMORY_BYTES, "file_limit_bytes": 100_000}, "DeviceError: "),
    ],
)
def test_mistakes_are_told(new_world: Any, seed: int, tmp_path: Path, settings: dict[str, int], message: str) -> None:
    (told,) = new_world(1).run(CASES, "error", seed=seed, folder=str(tmp_path), **settings)
    assert told.startswith(message)
    if "file_limit_bytes" in settings:
        assert f"{tmp_path / 'rows-0'}" in told
        assert not list(tmp_path.iterdir())
