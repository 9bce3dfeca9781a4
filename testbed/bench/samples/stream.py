# SPDX-License-Identifier: Apache-2.0
"""`sennit bench stream`: what a reader of few files takes, beside one of a hundred times as many rows.

Each turn is a process of its own (`stream_reader`), which opens the files and takes shuffled batches of them: its
greatest memory, and the time to the first batch, at the begin and at a late step.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.console import Console
from rich.table import Table

from sennit.errors import SennitError
from sennit.runtime.calibrate.machine import describe
from sennit.runtime.data.packages import require
from sennit.runtime.stream.loader import StreamLoader

FILE_ROWS: Final = 1_000_000
GROUPS: Final = 20
"""Row groups of a file."""

BATCH_ROWS: Final = 512
SCHEMA: Final = 'label = "clicked"\ndense = ["price"]\n[sparse.user]\nencode = "hash"\nrows = 1_000_000\n'
PROGRAM: Final = "sennit.testbed.bench.samples.stream_reader"
DEADLINE_S: Final = 600.0


class BenchError(SennitError):
    """Nothing was measured. The message is the reader's last line."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What one process took."""

    memory_bytes: int
    """The greatest that it had, by `VmHWM`."""

    open_s: float
    """Until the stream was open, whose preprocessing is known."""

    first_s: float
    """From there to the first batch."""

    resumed_s: float | None
    """From `load_state_dict` to the first batch; None where the stream has no such step."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """A stream of so many rows."""

    rows: int
    turns: list[Turn]

    def median(self, name: str) -> float | None:
        """Over turns, of what a field of `Turn` has."""
        found = [value for turn in self.turns if (value := getattr(turn, name)) is not None]
        return statistics.median(found) if found else None


def run(*, rows: Sequence[int], steps: int, resume: int, rounds: int, seed: int, folder: Path | None) -> list[Result]:
    """Writes streams of `rows` into a folder in `folder`, which goes again. Streams take turns.

    `steps`: batches that a turn takes. `resume`: the late step. Raises BenchError if a reader fails.
    """
    with tempfile.TemporaryDirectory(prefix="sennit-stream-", dir=folder) as made:
        first = Path(made) / "first.parquet"
        _write(first, min(FILE_ROWS, *rows), seed)
        schema, known = Path(made) / "schema.toml", Path(made) / "preprocessing.json"
        schema.write_text(SCHEMA, encoding="utf-8")
        with StreamLoader(str(first), schema=schema, batch_size=BATCH_ROWS) as loader:
            known.write_text(loader.preprocessing.text(), encoding="utf-8")
        places = {count: Path(made) / str(count) for count in rows}
        for count, place in places.items():
            place.mkdir()
            for number in range(-(-count // FILE_ROWS)):
                shutil.copyfile(first, place / f"part-{number:05}.parquet")
        turns: dict[int, list[Turn]] = {count: [] for count in rows}
        for turn in range(rounds):
            for number in range(len(rows)):
                count = rows[(turn + number) % len(rows)]
                turns[count].append(_turn(places[count], schema, known, steps, resume))
    return [Result(rows=count, turns=turns[count]) for count in rows]


def _write(path: Path, rows: int, seed: int) -> None:
    arrow = require("pyarrow", package="pyarrow", purpose="sennit bench stream")
    parquet = require("pyarrow.parquet", package="pyarrow", purpose="sennit bench stream")
    random = np.random.default_rng(seed)
    table = arrow.table(
        {
            "clicked": (random.random(rows) < 0.3).astype(np.int8),
            "price": random.standard_normal(rows).astype(np.float32),
            "user": random.integers(-(2**62), 2**62, rows),
        }
    )
    parquet.write_table(table, path, row_group_size=-(-rows // GROUPS))


def _turn(place: Path, schema: Path, known: Path, steps: int, resume: int) -> Turn:
    command = [sys.executable, "-m", PROGRAM, *map(str, (place, schema, known, BATCH_ROWS, steps, resume))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    except subprocess.TimeoutExpired:
        raise BenchError(f"a reader took more than {DEADLINE_S:g} s") from None
    if done.returncode != 0:
        raise BenchError(done.stderr.strip().rpartition("\n")[2] or f"a reader ended with {done.returncode}")
    return Turn(**json.loads(done.stdout))


def render(found: list[Result], console: Console) -> None:
    table = Table(box=None, pad_edge=False)
    for name in ("rows", "memory, MB", "beside the first", "open, s", "first batch, s", "resumed, s"):
        table.add_column(name, justify="right")
    base = statistics.median(turn.memory_bytes for turn in found[0].turns)
    for result in found:
        memory = statistics.median(turn.memory_bytes for turn in result.turns)
        times = [result.median(name) for name in ("open_s", "first_s", "resumed_s")]
        told = ["" if taken is None else f"{taken:.2f}" for taken in times]
        table.add_row(f"{result.rows:,}", f"{memory / 1e6:.0f}", f"{memory / base:.3f}", *told)
    console.print(table)


def as_json(found: list[Result], **settings: Any) -> dict[str, Any]:
    """`settings`: those of `run`."""
    return {
        "machine": describe(),
        "settings": settings | {"batch_rows": BATCH_ROWS, "file_rows": FILE_ROWS, "groups": GROUPS},
        "results": [{"rows": result.rows, "turns": [asdict(turn) for turn in result.turns]} for result in found],
    }
