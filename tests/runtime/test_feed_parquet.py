# SPDX-License-Identifier: Apache-2.0
"""Parquet with ids of 64 bits from two workers gives the weights of a run that reads the same files, bit for bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.runtime.test_ingest_train import MODEL
from tests.runtime.whole_run import train

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

SCHEMA = """
label = "clicked"
[dense.price]
clamp = [0, 50]
log1p = true
[dense.age]
[sparse.user]
encode = "hash"
rows = 500
salt = 3
[sparse.seen]
encode = "hash"
rows = 300
first = 4
[sparse.shop]
encode = "dynamic"
rows = 5000
[sparse.city]
encode = "dictionary"
[sparse.hour]
rows = 24
"""
COUNT = 300


def part(rng: np.random.Generator) -> Any:
    return arrow.table(
        {
            "clicked": rng.integers(0, 2, COUNT),
            "price": rng.exponential(30.0, COUNT),
            "age": rng.integers(1, 99, COUNT),
            "user": rng.integers(0, 2**64 - 1, COUNT, dtype=np.uint64),
            "seen": [rng.integers(-(2**62), 2**62, length).tolist() for length in rng.integers(0, 12, COUNT)],
            "shop": [rng.integers(-(2**63), 2**63 - 1, length).tolist() for length in rng.integers(0, 3, COUNT)],
            "city": rng.choice(["Ulm", "Bonn", "Kiel"], COUNT),
            "hour": rng.integers(0, 24, COUNT),
        }
    )


@pytest.mark.long
def test_weights_are_those_of_a_run_that_reads_the_files(tmp_path: Path, port: int, rng: np.random.Generator) -> None:
    folder, schema = tmp_path / "clicks", tmp_path / "schema.toml"
    folder.mkdir()
    for number in range(2):
        parquet.write_table(part(rng), folder / f"part-{number}.parquet", row_group_size=128)
    schema.write_text(SCHEMA)
    sent = tmp_path / "sent.json"
    data = ["--data", str(folder), "--schema", str(schema)]
    expected = train(tmp_path / "memory.json", *MODEL, *data)
    options = ["--schema", str(schema), "--to", f"127.0.0.1:{port}", "--workers", "2", "--timeout", "60"]
    command = [sys.executable, "-m", "sennit", "feed", str(folder), *options, "--json", str(sent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as feed:
        try:
            target = ["--ingest", f"cpu://127.0.0.1:{port}", "--timeout", "60"]
            fed = train(tmp_path / "fed.json", *MODEL, *target)
            assert feed.wait(30) == 0, feed.stdout and feed.stdout.read()
        finally:
            feed.kill()
    assert fed["weights_sha256"] == expected["weights_sha256"]
    assert json.loads(sent.read_text())["counters"]["records"] >= fed["ingest"]["records"]
