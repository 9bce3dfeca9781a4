# SPDX-License-Identifier: Apache-2.0
"""Training with tables in a file: the bits of training in memory, checkpoints between the two, and errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

CASES = "stored_cases.py"
MEMORY_BYTES = 40 << 10


@pytest.mark.parametrize("size", [1, 2])
def test_weights_are_those_of_tables_in_memory(kept_world: Any, seed: int, tmp_path: Path, size: int) -> None:
    """Runs three epochs with an evaluation after each. Of two ranks, one has the largest table, the other the rest."""
    memory_bytes = MEMORY_BYTES if size == 1 else 25 << 10
    world = kept_world(size)
    memory = world.run(CASES, "train", seed=seed, steps=40)
    stored = world.run(CASES, "train", seed=seed, steps=40, folder=str(tmp_path), memory_bytes=memory_bytes)
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
