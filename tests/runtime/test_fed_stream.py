# SPDX-License-Identifier: Apache-2.0
"""Runs fed with a stream have the bits of runs that read the same files, whatever happens to their feeders."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.extent import briefly
from tests.runtime.stream.stream_files import SCHEMA, table, write
from tests.runtime.stream.test_stream_training import ORDERS, TINY, outcome
from tests.runtime.whole_run import train

pytestmark = pytest.mark.timeout(240)


def data_of(folder: Path, seed: int) -> list[str]:
    """Files without sample weights, for which records have no place."""
    options = write(folder, table(seed))
    (folder / "schema.toml").write_text(SCHEMA.replace('sample_weight = "worth"\n', ""))
    return options


@contextmanager
def feeder(port: int, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "sennit", "feed", *arguments, "--to", f"127.0.0.1:{port}", "--timeout", "60"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def fed(port: int) -> list[str]:
    return ["--ingest", f"cpu://127.0.0.1:{port}"]


@pytest.mark.parametrize("order", briefly(ORDERS, ["shuffled", "rolling"]))
def test_feeders_give_the_bits_of_files(order: str, seed: int, tmp_path: Path, port: int) -> None:
    data = data_of(tmp_path / "data", seed)
    options = [*TINY, *ORDERS[order], "--seed", str(seed)]
    alone = train(tmp_path / "files.json", *data, *options, "--ranks", "1")
    with feeder(port, *data, "--workers", "2") as process:
        found = train(tmp_path / "fed.json", *fed(port), *options, "--ranks", "2")
        said, _ = process.communicate(timeout=30)
    assert process.returncode == 0, said
    assert outcome(found) == outcome(alone)
