# SPDX-License-Identifier: Apache-2.0
"""Ranks that join a training run after a death, as additional ranks, or in vain; and the source of their state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sennit.runtime.training.handover import Claim, Source, find_source
from tests.runtime.elastic_runs import ElasticRun, elastic_run, join
from tests.runtime.whole_run import train

TINY = [
    "--data", "synthetic", "--samples", "700", "--row-limit", "200", "--batch-size", "60", "--dim", "4",
    "--bottom", "8", "--top", "8", "--epochs", "1", "--timeout", "60",
    "--sharding", "table_wise",
]  # fmt: skip
STEP_COUNT = 10


@contextmanager
def started(folder: Path, name: str, *arguments: str, **variables: Any) -> Iterator[ElasticRun]:
    with elastic_run(folder, name, *TINY, *arguments, **variables) as run:
        yield run


def whole_run(folder: Path, *arguments: str) -> dict[str, Any]:
    report = train(folder / "whole.json", *TINY, "--elastic", *arguments)
    assert report["steps"]["last"] == STEP_COUNT
    return report


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("transport", "ranks", "victim", "model", "own"),
    [
        ("udp", 2, 0, "", "--table-store {}/rows --table-memory 256KiB --checkpoint-async"),
        pytest.param(
            *(
                "shm",
                3,
                0,
                "--dense-optimizer adam --tensor-train 150:3",
                "--sharding data_parallel --exchange lossless",
            ),
            marks=pytest.mark.long,
        ),
        pytest.param(
            *("udp", 3, 1, "", "--sharding column_wise --checkpoint-async --checkpoint-increments 2"),
            marks=pytest.mark.long,
        ),
        pytest.param(
            *("shm", 2, 1, "--exchange int8", "--sharding column_wise --table-store {}/rows --table-memory 256KiB"),
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_rank_dies_and_a_new_one_takes_its_place(
    tmp_path: Path, transport: str, ranks: int, victim: int, model: str, own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights and quality are those of a run that was left alone, with another number of ranks.

    `model`: options that decide bits. `own`: those that do not.
    """
    monkeypatch.setenv("SENNIT_TRANSPORT", transport)
    (tmp_path / "tables.toml").write_text("[defaults]\nrow_shards = 2\ncolumn_shards = 2\n")
    options = (
        model.split() if "--tensor-train" in model else [*model.split(), "--tables", str(tmp_path / "tables.toml")]
    )
    mine = [*options, *own.format(tmp_path).split(), "--checkpoint-every", "3", "--checkpoint", str(tmp_path / "saved")]
    halt = tmp_path / "halted"
    deaths, halts = [[victim, 5, str(tmp_path / "died")]], [[ranks - 1, 5, str(halt)]]
    with started(tmp_path, "run", "--ranks", f"{ranks}", *mine, DEATHS=deaths, HALTS=halts) as run:
        address = run.address()
        run.wait_for(halt)
        assert join(address, *TINY, *mine) == 0
        report = run.report()
    assert report["world_size"] == ranks
    lost, joined = report["changes"]
    assert (lost["lost"], lost["joined"], lost["world_size"]) == ([victim], [], ranks - 1)
    # Nothing else may be whole, but a checkpoint that is written beside the steps may not be either.
    assert lost["step"] == 3 or (lost["step"] == 0 and "--checkpoint-async" in own)
    assert (joined["lost"], joined["joined"], joined["world_size"]) == ([], [ranks - 1], ranks)
    # The step that the smaller group had reached, not that of its last checkpoint.
    assert (joined["step"], report["steps"]["first"]) == (6, 6)
    expected = whole_run(tmp_path, "--ranks", "1", *options)
    for name in ("weights_sha256", "quality", "embedding"):
        assert report[name] == expected[name]
    assert (report["embedding"]["tensor_trains"] > 0) == ("--tensor-train" in options)
    # Neither the dead rank nor its successor leaves files.
    assert not (tmp_path / "rows").exists() or not list((tmp_path / "rows").iterdir())


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_newcomers_are_taken_in_without_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A newcomer with different options gets an error and changes nothing. Two others make one rank three."""
    halt = tmp_path / "halted"
    with started(tmp_path, "run", "--ranks", "1", HALTS=[[1, 4, str(halt)]]) as run:
        address = run.address()
        run.wait_for(halt)
        assert join(address, *TINY, "--dense-rate", "0.5") == 1
        assert "needs the options of the run; dense_rate is 0.5 here and 0.02 there" in capsys.readouterr().err
        assert join(address, *TINY, "--ranks", "2") == 0
        report = run.report()
    assert report["world_size"] == 3
    # Both join together, or one at each boundary.
    assert [rank for change in report["changes"] for rank in change["joined"]] == [1, 2]
    assert report["changes"][0]["step"] == 5
    alone = whole_run(tmp_path, "--ranks", "1")
    assert report["weights_sha256"] == alone["weights_sha256"]


@pytest.mark.long
@pytest.mark.timeout(240)
def test_a_newcomer_that_dies_in_the_handover_costs_no_step(tmp_path: Path) -> None:
    halt = tmp_path / "halted"
    with started(tmp_path, "run", "--ranks", "2", HALTS=[[2, 4, str(halt)]]) as run:
        address = run.address()
        run.wait_for(halt)
        with started(tmp_path, "newcomer", "--join", address, DIES_IN_HANDOVER="1") as newcomer:
            code, output = newcomer.end()
        assert code == 1
        assert "process ended with signal 9" in output
        report = run.report()
    joined, lost = report["changes"]
    assert (joined["joined"], joined["world_size"]) == ([2], 3)
    assert (lost["lost"], lost["world_size"], lost["step"]) == ([2], 2, 5)
    undisturbed = whole_run(tmp_path, "--ranks", "2")
    assert report["weights_sha256"] == undisturbed["weights_sha256"]


def test_the_newest_whole_state_is_handed_over() -> None:
    def claim(step: int, *shards: str) -> Claim:
        return Claim(step=step, shards=shards)

    whole = Source(step=5, holder_of={"a": 0, "b": 1}, dense_holder=0)
    assert find_source([claim(5, "a"), claim(5, "b"), None], ["a", "b"]) == whole
    # A rank that holds no shard still has the dense part.
    assert find_source([claim(5), claim(5, "a", "b")], ["a", "b"]) == Source(
        step=5, holder_of={"a": 1, "b": 1}, dense_holder=0
    )
    # Parts of two steps make no state. An older whole state is better than none.
    assert find_source([claim(5, "a"), claim(6, "b")], ["a", "b"]) is None
    assert find_source([claim(5, "a", "b"), claim(6, "b")], ["a", "b"]) == Source(
        step=5, holder_of={"a": 0, "b": 0}, dense_holder=0
    )
    assert find_source([None, None], ["a"]) is None
