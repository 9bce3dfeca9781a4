# SPDX-License-Identifier: Apache-2.0
"""`sennit bench codecs`: a small run from end to end. No timing is asserted."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from sennit.commands.cli import app
from sennit.testbed.bench.transport import codecs
from sennit.transport import _core
from sennit.transport.codecs import CodecKind


def test_command_writes_every_figure(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    path = tmp_path / "found.json"
    options = ["--size", "256KiB", "--rounds", "2", "--force", "--json", str(path)]
    result = CliRunner().invoke(app, ["bench", "codecs", *options])
    assert result.exit_code == 0, result.output
    found = json.loads(path.read_text())
    assert found["settings"] == {"size_bytes": 1 << 18, "rounds": 2, "seed": 1}
    rows = {row["name"]: row for row in found["codecs"]}
    assert len(rows) == 2 * len(CodecKind) - 1
    assert rows["mx4, 32 a block"]["ratio"] == 32 / 4.25
    assert rows["int8, stochastic, 64 a block"]["ratio"] == 4 * 64 / 68
    assert 1.1 < rows["lossless"]["ratio"] < 1.3
    assert {name: sorted(row["peers"]) for name, row in rows.items() if row["peers"]} == {
        "fp16": ["numpy", "torch"],
        "bf16": ["torch"],
        "fp8_e4m3, 32 a block": ["torch"],
        "fp8_e5m2, 32 a block": ["torch"],
    }
    for name, row in rows.items():
        assert min(row["encode_bytes_per_s"], row["decode_bytes_per_s"]) > 0
        assert (row["encode_with_residual_bytes_per_s"] is None) == (name == "lossless")
        assert name in " ".join(result.output.split()) or "stochastic" in name
    assert torch.get_num_threads() == threads


def test_a_size_that_means_nothing_is_refused() -> None:
    for size in ("0", "3", "many"):
        assert CliRunner().invoke(app, ["bench", "codecs", "--size", size]).exit_code == 2


def test_a_codec_that_does_not_read_what_it_wrote_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_core, "decode", lambda *_: False)
    with pytest.raises(RuntimeError, match="does not read what it wrote"):
        codecs.run(size_bytes=4_096, rounds=1, seed=1)
