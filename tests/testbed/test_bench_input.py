# SPDX-License-Identifier: Apache-2.0
"""A small run of the benchmark of input: all ways read all rows, and the batches have them. No timing is asserted."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from sennit.runtime.data.arrow_columns import Piece, raw_samples
from sennit.runtime.data.errors import MissingPackage
from sennit.runtime.data.preprocessing import Preprocessing
from sennit.runtime.data.schema import parse_schema
from sennit.runtime.stream.encoder import Encoder
from sennit.runtime.stream.index import open_index

parquet = pytest.importorskip("pyarrow.parquet")
from sennit.testbed.bench.samples import file_input, input_peers  # noqa: E402


def test_a_small_run_has_all_formats_and_peers() -> None:
    settings: Any = {"rows": 300, "row_wise_rows": 100, "rounds": 2, "seed": 1}
    found = file_input.run(**settings)
    assert [(result.format, result.peer) for result in found] == [
        ("tsv", "pyarrow.csv"),
        ("parquet", "pyarrow.parquet"),
        ("parquet", "torch DataLoader"),
    ]
    console = Console(record=True, width=160)
    file_input.render(found, console)
    report: Any = file_input.as_json(found, **settings)
    for result, row in zip(found, report["results"], strict=True):
        assert [len(turns) for turns in result.row_s.values()] == [2, 2]
        assert f"{result.ratio:.2f}" in console.export_text(clear=False)
        assert [len(turns) for turns in result.processor_row_s.values()] == [2, 2]
        assert (row["ratio"], row["processor_ratio"]) == (result.ratio, result.processor_ratio)


def test_batches_have_the_rows_of_the_file(tmp_path: Path) -> None:
    table = file_input.numbers_and_ids(file_input.BATCH_ROWS + 10, seed=1)
    parquet.write_table(table, tmp_path / "rows.parquet", row_group_size=3000)
    index = open_index([str(tmp_path / "rows.parquet")], file_input.COLUMNS)
    sparse = {name: {"rows": file_input.TABLE_ROWS} for name in file_input.IDS}
    schema = parse_schema({"label": file_input.LABEL, "dense": list(file_input.NUMBERS), "sparse": sparse})
    raw = raw_samples("rows", [Piece(table, index.place(0))], schema)
    encoder = Encoder(schema, Preprocessing.fit(raw, torch.ones(len(raw), dtype=torch.bool)))
    made = list(file_input.batches(index, encoder))
    assert [batch.sample_count for batch in made] == [3000, file_input.BATCH_ROWS + 10 - 3000]
    ids = torch.cat([batch.values.view(len(file_input.IDS), -1) for batch in made], 1)
    assert [column.tolist() for column in ids] == [table[name].to_pylist() for name in file_input.IDS]


@pytest.mark.parametrize("name", input_peers.AGAINST)
def test_loaders_of_others_read_the_rows_or_are_named(name: str) -> None:
    settings: Any = {"rows": 300, "row_wise_rows": 100, "rounds": 1, "seed": 1}
    if importlib.util.find_spec({"datasets": "datasets", "mosaicml-streaming": "streaming"}[name]) is None:
        with pytest.raises(MissingPackage, match=f"{name}"):
            file_input.run(**settings, against=[name])
        return
    assert [result.peer for result in file_input.run(**settings, against=[name])][-1] == name
