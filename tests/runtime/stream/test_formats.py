# SPDX-License-Identifier: Apache-2.0
"""What a file's format is changes no bit of a model, and what is wrong with a file ends a run with its name."""

from __future__ import annotations

import gzip
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sennit.runtime.stream import text_file
from sennit.runtime.stream.spooling import spool
from tests.extent import briefly
from tests.runtime.stream.stream_files import table
from tests.runtime.whole_run import failure, train

pa = pytest.importorskip("pyarrow")
csv = pytest.importorskip("pyarrow.csv")
feather = pytest.importorskip("pyarrow.feather")
pq = pytest.importorskip("pyarrow.parquet")

OPTIONS = ["--batch-size", "40", "--dim", "4", "--bottom", "8", "--top", "8", "--decay", "none", "--timeout", "60",
    "--row-shards", "4", "--ranks", "1",
]  # fmt: skip
SCHEMA = """
label = "clicked"
time = "at"
sample_weight = "worth"
dense = ["price", "age"]
[sparse.user]
rows = 40
[sparse.town]
encode = "hash"
rows = 30
[sparse.city]
encode = "dictionary"
"""


def rows(seed: int) -> Any:
    """Those of stream_files, but for lists, which text has not."""
    found = table(seed).drop(["seen"])
    numbers = found.set_column(0, "clicked", found["clicked"].cast(pa.int8()))
    return numbers.append_column("town", found["city"])


def text_of(content: Any, delimiter: str = ",") -> bytes:
    made = io.BytesIO()
    csv.write_csv(content, made, csv.WriteOptions(delimiter=delimiter))
    return made.getvalue()


WRITERS: dict[str, Callable[[Any, Path], Any]] = {
    "parquet": lambda content, path: pq.write_table(content, f"{path}.parquet", row_group_size=90),
    "feather": lambda content, path: feather.write_feather(content, f"{path}.feather", chunksize=70),
    "csv": lambda content, path: Path(f"{path}.csv").write_bytes(text_of(content)),
    "tsv.gz": lambda content, path: Path(f"{path}.tsv.gz").write_bytes(gzip.compress(text_of(content, "\t"))),
    "spooled": lambda content, path: spool(content.to_pylist(), path.parent / "spooled"),
}


def written(folder: Path, form: str, content: Any, schema: str = SCHEMA) -> list[str]:
    folder.mkdir()
    WRITERS[form](content, folder / "part")
    (folder / "schema.toml").write_text(schema)
    data = folder / "spooled" if form == "spooled" else folder
    return ["--data", str(data), "--schema", str(folder / "schema.toml"), *OPTIONS]


@pytest.mark.parametrize("form", briefly(sorted(set(WRITERS) - {"parquet"}), ["tsv.gz"]))
def test_the_format_changes_no_bit(form: str, seed: int, tmp_path: Path) -> None:
    content = rows(seed)
    reports = [
        train(tmp_path / f"{one}.json", *written(tmp_path / one, one, content), "--order", "time", "--seed", str(seed))
        for one in ("parquet", form)
    ]
    assert reports[0]["weights_sha256"] == reports[1]["weights_sha256"]
    assert reports[0]["quality"] == reports[1]["quality"]


def test_a_broken_line_ends_the_run_or_is_left_out(
    seed: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    content = rows(seed)
    whole = written(tmp_path / "whole", "csv", content)
    broken = written(tmp_path / "broken", "csv", content)
    path = tmp_path / "broken" / "part.csv"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:700], lines[700].replace('"city', '"a city', 1)[:-9] + "\n", *lines[700:]]))
    told = failure(capfd, *broken, "--order", "time")
    assert "broken/part.csv: " in told
    assert "line 701" in told
    (tmp_path / "broken" / "schema.toml").write_text(SCHEMA + "[text]\nskip_broken = 1\n")
    reports = [
        train(tmp_path / f"{number}.json", *options, "--order", "time", "--seed", str(seed))
        for number, options in enumerate((whole, broken))
    ]
    assert reports[0]["weights_sha256"] == reports[1]["weights_sha256"]


def test_compressed_text_is_not_shuffled(seed: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    content = rows(seed)
    many = pa.concat_tables([content] * (text_file.BLOCK_BYTES // len(text_of(content)) + 1))
    told = failure(capfd, *written(tmp_path / "data", "tsv.gz", many), "--order", "shuffled", "--shuffle-rows", "100")
    assert "part.tsv.gz: it has to be read from its beginning; allowed: --order time or files, or to unpack it" in told


@pytest.mark.parametrize(("column", "row", "value", "message"), [
    ("clicked", 333, 7, "column clicked, line 335: label 7.0; allowed: 0 and 1"),
    ("user", 334, 40, r"column user, line 336: row id 40; allowed in table user: [0, 40)"),
    ("worth", 335, -1.0, "column worth, line 337: sample weight -1.0; allowed: 0 or more"),
])  # fmt: skip
def test_a_value_that_the_schema_does_not_allow_is_named_by_its_line(
    column: str, row: int, value: Any, message: str, seed: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    content = rows(seed)
    values = content[column].to_pylist()
    values[row] = value
    number = content.schema.get_field_index(column)
    wrong = content.set_column(number, column, pa.array(values, content.schema.field(number).type))
    told = failure(capfd, *written(tmp_path / "data", "csv", wrong), "--order", "shuffled", "--shuffle-rows", "100")
    assert f"part.csv: {message}" in told
