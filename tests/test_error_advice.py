# SPDX-License-Identifier: Apache-2.0
"""Errors of the commands say first what is wrong, and end with what to do (docs/reference/commands.md)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sennit.command_line import ANOTHER_FILE, ANOTHER_FOLDER
from sennit.commands.cli import app

pytestmark = pytest.mark.needs("backend")

TRAIN = ["train", "--data", "synthetic", "--samples", "4096"]
TIMELINE = "allowed: a file of sennit train --timeline"
# Arguments, what is said to be wrong, and the end of the message. FILE is a text file, FOLDER the folder of it, and
# nobody can write below /proc/none.
ERRORS = {
    "size": (["explain", "allreduce", "4XB"], "size '4XB'", "expected a number with one of B, KiB, MiB, GiB, TiB"),
    "hosts": (["explain", "allreduce", "4KiB", "--hosts", "9"], "--hosts 9", "allowed: 1..8, the number of ranks"),
    "timeline-missing": (["timeline", "/proc/none"], "/proc/none: No such file", TIMELINE),
    "timeline-text": (["timeline", "FILE"], "FILE is no timeline: Expecting value", TIMELINE),
    "export": (["export", "FOLDER", "out.pt"], "no checkpoint", "give what sennit train --checkpoint wrote"),
    "json": ([*TRAIN, "--json", "/proc/none/report.json"], "--json /proc/none/report.json cannot", ANOTHER_FILE),
    "timeline": ([*TRAIN, "--timeline", "FOLDER"], "--timeline FOLDER cannot be written", ANOTHER_FILE),
    "sketch": (
        [*TRAIN[:1], "--ingest", "cpu://127.0.0.1", "--sketch", "FOLDER"],
        "--sketch FOLDER cannot",
        ANOTHER_FILE,
    ),
    "exported": (["export", "FOLDER", "FOLDER"], "FOLDER cannot be written", ANOTHER_FILE),
    "rows": (["tables", "FOLDER", "--table", "x", "--parquet", "FOLDER"], "FOLDER cannot be written", ANOTHER_FILE),
    "planned": (["shard", *TRAIN[1:], "--json", "FOLDER"], "--json FOLDER cannot be written", ANOTHER_FILE),
    "placement": (["shard", *TRAIN[1:], "--output", "FOLDER"], "FOLDER cannot be written", ANOTHER_FILE),
    "checkpoint": (
        [*TRAIN, "--checkpoint", "FILE"],
        "--checkpoint FILE cannot be written: File exists",
        ANOTHER_FOLDER,
    ),
    "checkpoints": (
        [*TRAIN, "--checkpoint", "/proc/none"],
        "--checkpoint /proc/none cannot be written: No such",
        ANOTHER_FOLDER,
    ),
    "dash": (["bench", "collectives", "--json", "-"], "- is no name of a file", "give one, such as ./report"),
    "scenarios": (["testbed", "run", "plane-off", "--folder", "/proc/x"], "/proc/x cannot be written", ANOTHER_FOLDER),
    "simulated": (["testbed", "simulate", "--quick", "--out", "/proc/x"], "/proc/x cannot be written", ANOTHER_FOLDER),
    "steps": (["testbed", "simulate-steps", "--out", "/proc/x"], "/proc/x cannot be written", ANOTHER_FOLDER),
    "tiers": (["bench", "tiers", "--folder", "/proc/x"], "/proc/x cannot be written", ANOTHER_FOLDER),
    "no-results": (
        ["testbed", "report", "--folder", "FOLDER"],
        "FOLDER/results.json: No such file",
        "run 'sennit testbed run' first",
    ),
    "made": (["make-stream", "/proc/x"], "/proc/x cannot be written", ANOTHER_FOLDER),
    "data": (["train", "--data", "/proc/none.parquet"], "no such file", "give a path that has them"),
    "schema": (
        ["train", "--data", "FILE", "--schema", "/proc/none"],
        "schema /proc/none: [Errno 2] No such file",
        "give a text file that can be read",
    ),
    "schema-text": (
        ["train", "--data", "FILE", "--schema", "FILE"],
        "schema FILE: ",
        "write it as TOML (docs/reference/data-sets.md), or as .json",
    ),
    "tables": ([*TRAIN, "--tables", "/proc/none.toml"], "/proc/none.toml: ", "give a TOML file that can be read"),
    "sharding": ([*TRAIN, "--sharding", "/proc/none.toml"], "/proc/none.toml: ", "give a TOML file that can be read"),
    "model": ([*TRAIN, "--model", "nothing"], "model 'nothing'", "or package.module:factory"),
    "port": ([*TRAIN, "--port", "4000"], "--port or --join without --elastic", "allowed: with it"),
    "join": (
        [*TRAIN, "--elastic", "--checkpoint", "FOLDER/c", "--join", "127.0.0.1:1"],
        "no run at 127.0.0.1:1: Connection refused",
        "start it first with --elastic, and give the address that it prints",
    ),
    "ranks": (
        [*TRAIN, "--ranks", "99"],
        "number of ranks 99",
        "allowed: at most 8, the slices of a global batch (--slices)",
    ),
    "measured": (
        ["roofline", "--data", "synthetic", "--measured", "/proc/none"],
        "/proc/none: No such file",
        "give a file of sennit train --json",
    ),
    "feed": (
        ["feed", "--data", "synthetic", "--to", "127.0.0.1:1", "--json", "FOLDER"],
        "cannot be written",
        ANOTHER_FILE,
    ),
    "address": (
        ["feed", "--data", "synthetic", "--to", "nowhere"],
        "address 'nowhere'",
        "allowed: HOST:PORT, port 1 to 65535",
    ),
    "figures": (["bench", "collectives", "--json", "/proc/none/x"], "/proc/none/x cannot be written", ANOTHER_FILE),
    "plot": (["bench", "collectives", "--plot", "x.txt"], "x.txt", "allowed: names that end in .png, .svg, .pdf"),
    "report": (
        ["bench", "all", "--report", "/proc/none/x"],
        "/proc/none/x cannot be written",
        ANOTHER_FOLDER,
    ),
    "peer": (["doctor", "--peer", "nowhere.invalid"], "nowhere.invalid has no address", "that this machine resolves"),
    "metrics": (["metrics", "--listen", "x"], "--listen x", "must be ADDRESS:PORT, such as 127.0.0.1:9464"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_ends_with_what_to_do(name: str, tmp_path: Path) -> None:
    arguments, what, advice = ERRORS[name]
    file = tmp_path / "file"
    file.write_text("a text\n")

    def filled(text: str) -> str:
        return text.replace("FILE", str(file)).replace("FOLDER", str(tmp_path))

    done = CliRunner(env={"TERMINAL_WIDTH": "400"}).invoke(app, list(map(filled, arguments)))
    assert done.exit_code in (1, 2, 69), done.output
    (line,) = (line for line in done.output.splitlines() if re.match("error: ", line, re.IGNORECASE))
    assert filled(what) in line
    assert line.rstrip(".").endswith(filled(advice))


def test_a_calibration_that_cannot_be_used_names_the_command(tmp_path: Path) -> None:
    file = tmp_path / "constants.json"
    file.write_text("no JSON")
    done = CliRunner().invoke(app, ["explain", "allreduce", "4KiB"], env={"SENNIT_CALIBRATION": str(file)})
    assert done.exit_code == 1
    assert done.output.endswith("; make a new one with: sennit calibrate --output FILE\n")
