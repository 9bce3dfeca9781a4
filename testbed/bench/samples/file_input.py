# SPDX-License-Identifier: Apache-2.0
"""`sennit bench input`: rows a second from files to batches on one core, beside what reads the files alone.

Logs in the format of Criteo (a label, 13 counts, 26 texts of 8 hexadecimal digits, with empty fields) are TSV, and 13
numbers and 26 ids are Parquet. pyarrow gives columns, and makes no batches of them. torch's DataLoader makes batches of
rows that are in memory already, one row at a time, and neither scales nor hashes anything.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader, Dataset

from sennit.runtime.calibrate.machine import describe, one_core
from sennit.runtime.data.arrow_columns import Piece, raw_samples
from sennit.runtime.data.batch import Batch
from sennit.runtime.data.packages import require
from sennit.runtime.data.preprocessing import Preprocessing
from sennit.runtime.data.schema import Schema, parse_schema
from sennit.runtime.data.text_format import TextFormat
from sennit.runtime.stream.encoder import Encoder
from sennit.runtime.stream.files import PIECE_ROWS
from sennit.runtime.stream.index import StreamIndex, open_index
from sennit.testbed.bench.samples import input_peers

_PURPOSE: Final = "sennit bench input"
arrow = require("pyarrow", package="pyarrow", purpose=_PURPOSE)
csv = require("pyarrow.csv", package="pyarrow", purpose=_PURPOSE)
parquet = require("pyarrow.parquet", package="pyarrow", purpose=_PURPOSE)

BATCH_ROWS: Final = 4096
TABLE_ROWS: Final = 1_000_000
LABEL: Final = "clicked"
NUMBERS: Final = tuple(f"number{place}" for place in range(13))
IDS: Final = tuple(f"id{place}" for place in range(26))
COLUMNS: Final = (LABEL, *NUMBERS, *IDS)
DIGITS: Final = 20_000
"""Different texts of a column."""

NULLS: Final = 0.05
"""The share of empty fields in TSV."""

OURS: Final = "sennit"
CSV_TYPES: Final = {
    LABEL: arrow.int8(),
    **dict.fromkeys(NUMBERS, arrow.int64()),
    **dict.fromkeys(IDS, arrow.string()),
}


@dataclass(frozen=True, kw_only=True)
class Result:
    """One format beside one peer."""

    format: str
    peer: str
    row_s: dict[str, list[float]]
    """Seconds a row of each turn, ours and the peer's."""

    processor_row_s: dict[str, list[float]]
    """Of these, what a processor worked for the process. Others on the machine change it less."""

    @property
    def ratio(self) -> float:
        """The median over turns of the peer's time / ours. Above 1 sennit is faster."""
        return self._ratio(self.row_s)

    @property
    def processor_ratio(self) -> float:
        """The same of processor time."""
        return self._ratio(self.processor_row_s)

    def _ratio(self, row_s: dict[str, list[float]]) -> float:
        return statistics.median(theirs / ours for theirs, ours in zip(row_s[self.peer], row_s[OURS], strict=True))

    def rows_per_s(self, name: str) -> float:
        return 1 / statistics.median(self.row_s[name])


class Rows(Dataset[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]):
    """The rows of a Parquet file, each of three tensors: numbers, ids, label."""

    def __init__(self, table: Any, count: int) -> None:
        def columns(names: tuple[str, ...]) -> torch.Tensor:
            return torch.from_numpy(np.stack([table[name].to_numpy()[:count] for name in names], 1))

        self.numbers, self.ids, self.labels = columns(NUMBERS), columns(IDS), columns((LABEL,))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.numbers[row], self.ids[row], self.labels[row]


def run(*, rows: int, row_wise_rows: int, rounds: int, seed: int, against: Sequence[str] = ()) -> list[Result]:
    """`row_wise_rows`: those that row-wise peers read in a turn. Their time is counted by rows. `against`: loaders of
    others, too (`input_peers`). Raises `MissingPackage` for one that is not installed.
    """
    for name in against:
        input_peers.check(name)
    threads, processors = torch.get_num_threads(), arrow.cpu_count()
    torch.set_num_threads(1)
    arrow.set_cpu_count(1)
    try:
        with tempfile.TemporaryDirectory(prefix="sennit-input-") as made, one_core():
            return [
                *_text(Path(made), rows, rounds, seed),
                *_parquet(Path(made), rows, row_wise_rows, rounds, seed, against),
            ]
    finally:
        torch.set_num_threads(threads)
        arrow.set_cpu_count(processors)


def _text(folder: Path, rows: int, rounds: int, seed: int) -> list[Result]:
    path = folder / "day_0.tsv"
    options = csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")
    csv.write_csv(logs(rows, seed), path, options)
    index = open_index([str(path)], COLUMNS, text=TextFormat(delimiter="\t", names=COLUMNS, types=CSV_TYPES))
    schema = parse_schema(
        {
            "label": LABEL,
            "dense": {name: {"log1p": True} for name in NUMBERS},
            "sparse": {name: {"encode": "hash", "rows": TABLE_ROWS, "salt": salt} for salt, name in enumerate(IDS)},
        }
    )
    ours = _batches_of(index, schema)

    def alone() -> int:
        reader = csv.open_csv(
            path,
            csv.ReadOptions(use_threads=False, column_names=COLUMNS),
            csv.ParseOptions(delimiter="\t"),
            csv.ConvertOptions(column_types=CSV_TYPES, strings_can_be_null=True),
        )
        return sum(len(batch) for batch in reader)

    return _results("tsv", {OURS: ours, "pyarrow.csv": alone}, rounds)


def _parquet(
    folder: Path, rows: int, row_wise_rows: int, rounds: int, seed: int, against: Sequence[str]
) -> list[Result]:
    path = folder / "rows.parquet"
    table = numbers_and_ids(rows, seed)
    parquet.write_table(table, path)
    schema = parse_schema(
        {"label": LABEL, "dense": list(NUMBERS), "sparse": {name: {"rows": TABLE_ROWS} for name in IDS}}
    )
    ours = _batches_of(open_index([str(path)], COLUMNS), schema)

    def alone() -> int:
        with parquet.ParquetFile(path) as file:
            return sum(len(batch) for batch in file.iter_batches(PIECE_ROWS, columns=COLUMNS, use_threads=False))

    loader = DataLoader(Rows(table, row_wise_rows), batch_size=BATCH_ROWS)

    def row_wise() -> int:
        return sum(len(labels) for _, _, labels in loader)

    # Loaders of others take seconds for what the others read in a tenth of one.
    few = folder / "few.parquet"
    parquet.write_table(table.slice(0, row_wise_rows), few)
    others = {
        name: input_peers.reader(name, few, table.slice(0, row_wise_rows), batch_rows=BATCH_ROWS) for name in against
    }
    return _results("parquet", {OURS: ours, "pyarrow.parquet": alone, "torch DataLoader": row_wise, **others}, rounds)


def _batches_of(index: StreamIndex, schema: Schema) -> Callable[[], int]:
    first, rows = next(index.read(0, index.sample_count, COLUMNS))
    raw = raw_samples("rows", [Piece(rows, first)], schema)
    encoder = Encoder(schema, Preprocessing.fit(raw, torch.ones(len(raw), dtype=torch.bool)), index.schema)
    return lambda: sum(batch.sample_count for batch in batches(index, encoder))


def batches(index: StreamIndex, encoder: Encoder) -> Iterator[Batch]:
    """All rows in the order of the file."""
    for place, rows in index.read(0, index.sample_count, COLUMNS):
        samples = encoder.encode(rows, place)
        for begin in range(0, len(samples), BATCH_ROWS):
            yield samples.batch(torch.arange(begin, min(begin + BATCH_ROWS, len(samples))))


def _results(name: str, ways: dict[str, Callable[[], int]], rounds: int) -> list[Result]:
    taken: dict[str, list[float]] = {way: [] for way in ways}
    worked: dict[str, list[float]] = {way: [] for way in ways}
    names = list(ways)
    for way in names:  # a turn that pays one-time costs
        ways[way]()
    for turn in range(rounds):
        for place in range(len(names)):
            way = names[(turn + place) % len(names)]
            began_s, before_s = time.perf_counter(), time.process_time()
            rows = ways[way]()
            taken[way].append((time.perf_counter() - began_s) / rows)
            worked[way].append((time.process_time() - before_s) / rows)
    return [
        Result(
            format=name,
            peer=peer,
            row_s={way: taken[way] for way in (OURS, peer)},
            processor_row_s={way: worked[way] for way in (OURS, peer)},
        )
        for peer in names
        if peer != OURS
    ]


def logs(rows: int, seed: int) -> Any:
    """A `pyarrow.Table` like the logs of Criteo."""
    random = np.random.default_rng(seed)

    def holes() -> npt.NDArray[np.bool_]:
        return random.random(rows) < NULLS

    def texts() -> Any:
        known = arrow.array([f"{number:08x}" for number in random.integers(0, 1 << 32, DIGITS)])
        chosen = np.minimum(random.zipf(1.2, rows), DIGITS) - 1
        return known.take(arrow.array(chosen, mask=holes()))

    return arrow.table(
        {LABEL: (random.random(rows) < 0.3).astype(np.int8)}
        | {name: arrow.array(random.geometric(0.02, rows) - 1, mask=holes()) for name in NUMBERS}
        | {name: texts() for name in IDS}
    )


def numbers_and_ids(rows: int, seed: int) -> Any:
    """A `pyarrow.Table` of numbers (float32) and ids (int64) without nulls."""
    random = np.random.default_rng(seed)
    return arrow.table(
        {LABEL: (random.random(rows) < 0.3).astype(np.int8)}
        | {name: random.standard_normal(rows).astype(np.float32) for name in NUMBERS}
        | {name: random.integers(0, TABLE_ROWS, rows) for name in IDS}
    )


def render(found: list[Result], console: Console) -> None:
    table = Table(box=None, pad_edge=False)
    for name in ("file", "peer", "peer / sennit", "processor time", "sennit, rows/s", "peer, rows/s"):
        table.add_column(name, justify="left" if name in ("file", "peer") else "right")
    for result in found:
        rates = [f"{result.rows_per_s(name):,.0f}" for name in (OURS, result.peer)]
        ratios = f"{result.ratio:.2f}", f"{result.processor_ratio:.2f}"
        table.add_row(result.format, result.peer, *ratios, *rates)
    console.print(table)


def as_json(found: list[Result], **settings: int) -> dict[str, Any]:
    """`settings`: those of `run`."""
    return {
        "machine": describe(),
        "settings": settings | {"batch_rows": BATCH_ROWS, "threads": 1},
        "unit": "seconds a row; ratio: the median over turns of the peer's time / sennit's",
        "results": [
            {
                "format": result.format,
                "peer": result.peer,
                "ratio": result.ratio,
                "processor_ratio": result.processor_ratio,
                "rows_per_s": {name: result.rows_per_s(name) for name in result.row_s},
                "samples_s": result.row_s,
                "processor_samples_s": result.processor_row_s,
            }
            for result in found
        ],
    }
