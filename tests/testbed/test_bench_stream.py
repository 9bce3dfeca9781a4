# SPDX-License-Identifier: Apache-2.0
"""A small run of the benchmark of streams: every reader takes its batches. No timing is asserted."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

pytest.importorskip("torch")
pytest.importorskip("pyarrow")
from sennit.testbed.bench.samples import stream, stream_reader


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Readers need no process of their own, which would import torch."""

    def read(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert command[1:3] == ["-m", stream_reader.__name__]
        stream_reader.main(*command[3:])
        return subprocess.CompletedProcess(command, 0, capsys.readouterr().out, "")

    monkeypatch.setattr(subprocess, "run", read)


@pytest.mark.usefixtures("in_this_process")
def test_a_small_run_has_all_streams_and_a_late_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "FILE_ROWS", 6_000)
    found = stream.run(rows=(6_000, 18_000), steps=3, resume=20, rounds=1, seed=1, folder=tmp_path)
    assert not list(tmp_path.iterdir())
    (few,), (many,) = (result.turns for result in found)
    # 10 batches and 31.
    assert few.resumed_s is None
    assert many.resumed_s is not None
    assert min(few.memory_bytes, many.memory_bytes) > 10e6
    console = Console(record=True, width=160)
    stream.render(found, console)
    assert f"{many.memory_bytes / few.memory_bytes:.3f}" in console.export_text()
    assert [len(result["turns"]) for result in stream.as_json(found)["results"]] == [1, 1]


def test_a_reader_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "PROGRAM", "sennit.no_such_reader")
    with pytest.raises(stream.BenchError, match=r"No module named sennit\.no_such_reader"):
        stream.run(rows=(1_000,), steps=1, resume=0, rounds=1, seed=1, folder=tmp_path)
    assert not list(tmp_path.iterdir())
