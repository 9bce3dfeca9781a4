# SPDX-License-Identifier: Apache-2.0
"""The command `sennit` as a user meets it: help, versions, wrong options."""

import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.progress import Progress
from rich.table import Table
from typer.testing import CliRunner

import sennit
from sennit import command_line
from sennit.commands.cli import ORDER, app
from sennit.doctor import capabilities
from sennit.transport.choice.calibration import REMEDY
from sennit.transport.codecs import COLLECTIVE_CODECS

runner = CliRunner()


def test_help_names_all_commands() -> None:
    result = runner.invoke(app, ["--help"])
    assert result.exit_code == 0
    for command in ("doctor", "train", "testbed", "bench", "version"):
        assert command in result.output


@pytest.mark.parametrize("status", [0, 1])
def test_demo_trains_on_flights_and_says_how_to_go_on(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []

    def train(arguments: list[str]) -> None:
        calls.append(arguments)
        raise SystemExit(status)

    monkeypatch.setattr("sennit.runtime.training.__main__.main", train)
    result = runner.invoke(app, ["demo", "--ranks", "3"])
    assert calls == [["--data", "flights", "--ranks", "3"]]
    assert result.exit_code == status
    assert ("sennit doctor" in result.output) == (status == 0)


def test_commands_stand_in_the_order_of_a_newcomer() -> None:
    lines = runner.invoke(app, ["--help"]).output.partition("Commands:")[2].splitlines()
    names = [line.split()[0] for line in lines if line.strip()]
    assert names[: len(ORDER)] == list(ORDER)


def commands(group: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yields the name as typed and the command, for all commands below a group."""
    for part, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{name} {part}")
        else:
            yield f"{name} {part}", command


COMMANDS = dict(commands(typer.main.get_command(app), "sennit"))


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_every_command_has_a_sentence_and_an_example(name: str) -> None:
    result = runner.invoke(app, [*name.split()[1:], "--help"])
    assert result.exit_code == 0
    _, found, example = " ".join(result.output.split()).partition("Example: ")
    assert found, result.output
    assert name in example
    assert COMMANDS[name].help.rstrip().endswith(".")


# Those that may take more than two seconds, with arguments; FILE is a file that is there.
LONG = {
    "sennit timeline": ["FILE"],
    "sennit shard": ["--data", "flights"],
    "sennit roofline": ["--data", "flights"],
    "sennit export": ["FILE", "FILE"],
    "sennit convert": ["FILE", "FILE.folder", "--slices", "16"],
    "sennit tables": ["FILE"],
    "sennit make-stream": ["FILE.stream", "--days", "1", "--rows-per-day", "9"],
    "sennit calibrate": ["--ranks", "2"],
    "sennit build-extension": [],
    **{f"sennit bench {name}": [] for name in ("collectives", "planner", "placements", "overlap", "group", "timeline")},
    **{f"sennit bench {name}": [] for name in ("start", "slices", "sharded", "quality", "offload", "codecs", "tiers")},
    **{f"sennit bench {name}": [] for name in ("ingest", "input", "embedding", "gpu", "rdma", "cost", "scaling")},
    **{f"sennit bench {name}": [] for name in ("aggregate", "attention", "drift", "dynamic", "rack", "feed", "stream")},
    "sennit bench balance": [],
    "sennit bench all": ["--force", "--report", "FILE.report"],
    "sennit testbed run": ["plane-off", "--folder", "FILE.run"],
    "sennit testbed simulate-steps": ["--out", "FILE.steps"],
    "sennit testbed simulate": ["--quick", "--out", "FILE.simulation"],
    "sennit testbed kernel": [],
    "sennit trace headers": [],
}
# These show by themselves how far they are, or what another program prints.
SHOWN = {
    *(f"sennit {name}" for name in ("agent", "aggregate", "demo", "feed", "metrics", "opi", "top", "train")),
    "sennit testbed vm",
    *(f"sennit trace {name}" for name in ("ingest", "loss", "ops", "packets", "paths", "stalls")),
}
SHORT = {f"sennit {name}" for name in ("doctor", "explain", "testbed list", "testbed report", "trace list", "version")}


def test_of_every_command_it_is_known_how_long_it_may_take() -> None:
    assert sorted([*LONG, *SHOWN, *SHORT]) == sorted(COMMANDS)


@pytest.mark.needs("backend")
@pytest.mark.parametrize("name", LONG)
def test_a_long_command_begins_with_a_line_that_says_so(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = KeyError("the line")

    def start(line: Progress) -> None:
        assert line.console.stderr
        assert line.live.transient
        raise begun

    file = tmp_path / "file"
    file.touch()
    monkeypatch.setattr(Progress, "start", start)
    monkeypatch.setattr(capabilities, "missing", lambda *names: None)
    monkeypatch.setattr("sennit.runtime.trace.kernel_headers.installed", lambda: False)
    arguments = [argument.replace("FILE", str(file)) for argument in LONG[name]]
    result = runner.invoke(app, [*name.split()[1:], *arguments])
    assert result.exception is begun, result.output


def test_a_line_of_progress_is_for_terminals(capsys: pytest.CaptureFixture[str]) -> None:
    with command_line.busy("measuring [at::1]"):
        print("a result")
    assert capsys.readouterr() == ("a result\n", "")


ROOT = Path(__file__).resolve().parents[1]


def test_the_reference_has_every_command_and_exit_status() -> None:
    page = (ROOT / "docs" / "reference" / "commands.md").read_text()
    assert not [name for name in COMMANDS if f"| `{name}` |" not in page]
    table = page.partition("| exit status | means |")[2].partition("\n\n")[0]
    told = {number for line in table.splitlines() for number in re.findall(r"\d+", line.partition(" | ")[0])}
    used = {
        number
        for layer in ("sennit", "runtime", "testbed", "offload", "transport")
        for path in (ROOT / layer).rglob("*.py")
        for number in re.findall(r"^EXIT_\w+(?:: Final)? = (\d+)$", path.read_text(), re.MULTILINE)
    }
    assert {"69", "74", "124", "125", "128", "130"} <= used <= told


@pytest.mark.parametrize(
    ("options", "variable", "chosen", "why"),
    [
        (["allreduce", "4KiB"], "", "one_shot", "the least time by the model"),
        (["allreduce", "16MiB", "--ranks", "64", "--hosts", "8"], "", "hierarchical", "the least time by the model"),
        (["allreduce", "16MiB"], "halving", "halving", "set by SENNIT_ALGORITHM"),
        (["alltoall", "512B", "--hosts", "8"], "", "bruck", "the least time by the model"),
        (["alltoall", "9KiB", "--hosts", "2"], "", "hierarchical", "the least time by the model for 16 KiB"),
        (["gather", "64KiB", "--ranks", "64", "--hosts", "64"], "", "tree", "the least time by the model"),
        (["allreduce", "16MiB"], "", "round_trip", "the least time by the model"),
        (["allreduce", "16MiB", "--leaves", "8"], "", "direct", "the least time by the model"),
        (["reduce_scatter", "4KiB"], "round_trip", "direct", "SENNIT_ALGORITHM=round_trip does not run here"),
        (["allreduce", "16MiB", "--leaves", "13"], "halving", "halving", "set by SENNIT_ALGORITHM"),
        (["allreduce", "96KiB", "--leaves", "12"], "one_shot", "direct", "SENNIT_ALGORITHM=one_shot does not run here"),
        (["reduce_scatter", "4KiB"], "one_shot", "direct", "SENNIT_ALGORITHM=one_shot does not run here"),
        (["all_reduce", "4KiB"], "", "one_shot", "the least time by the model"),
        (["all_to_all", "512B", "--hosts", "8"], "", "bruck", "the least time by the model"),
    ],
)
def test_explain_names_the_algorithm_and_the_reason(
    options: list[str], variable: str, chosen: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SENNIT_ALGORITHM", variable)
    found = json.loads(runner.invoke(app, ["explain", *options, "--json"]).output)
    assert (found["chosen"], found["why"]) == (chosen, why)
    assert chosen in [row["name"] for row in found["algorithms"]]
    table = runner.invoke(app, ["explain", *options]).output
    assert f"{chosen} <-" in table
    assert f"run {chosen}: {why}." in " ".join(table.split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["allreduce", "4XB"], "size '4XB': expected a number with one of B, KiB, MiB, GiB, TiB"),
        (["allreduce", "4KiB", "--hosts", "9"], "--hosts 9; allowed: 1..8, the number of ranks"),
        (["allreduce", "4KiB", "--leaves", "7"], "--leaves 7; allowed: with allreduce, 8 or more"),
        (["reduce", "4KiB", "--leaves", "16"], "--leaves 16; allowed: with allreduce, 8 or more"),
        (["allreduce", "4KiB", "--dtype", "float8"], "--dtype float8; allowed: float32, float16"),
        (["allreduce", "4KiB", "--codec", "zip"], "--codec zip; allowed: auto, fp16, bf16, fp8"),
        (["alltoall", "4KiB", "--codec", "int8", "--dtype", "int64"], "--codec with --dtype int64; allowed: float32"),
        (["alltoall", "4KiB", "--stochastic"], "--stochastic without --codec"),
        (["alltoall", "4KiB", "--gbit", "1"], "--gbit 1; allowed: 0.0001..10000, with --hosts 2 or more"),
        (["alltoall", "4KiB", "--hosts", "2", "--gbit", "nan"], "--gbit nan; allowed"),
        (["scan", "4KiB"], "'scan'; allowed: allreduce, reduce_scatter, reduce, allgather, gather, alltoall"),
    ],
)
def test_explain_refuses_what_it_cannot_explain(options: list[str], message: str) -> None:
    result = CliRunner(env={"TERMINAL_WIDTH": "200"}).invoke(app, ["explain", *options])
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.parametrize(
    ("options", "best", "why"),
    [
        (
            ["allreduce", "64MiB", "--hosts", "2", "--ranks", "2", "--gbit", "0.2"],
            "mx4",
            "mx4 takes the least time: sending takes",
        ),
        (["allreduce", "64MiB", "--ranks", "2"], None, "No codec pays. bf16 comes nearest: sending takes"),
        (
            ["allreduce", "64MiB", "--hosts", "4", "--ranks", "32"],
            "mx4 between hosts",
            "mx4 between hosts takes the least time: sending takes",
        ),
        (
            ["alltoall", "1KiB", "--hosts", "4", "--ranks", "32"],
            None,
            "µs more, because it goes straight and not by hierarchical, and coding takes",
        ),
        (["gather", "64MiB"], None, "This collective takes no codec."),
    ],
)
def test_explain_says_whether_a_codec_pays_and_why(options: list[str], best: str | None, why: str) -> None:
    command = ["explain", *options, "--codec", "auto"]
    found = json.loads(runner.invoke(app, [*command, "--json"]).output)
    rows = found["codecs"]
    plain = next(row["estimated_s"] for row in found["algorithms"] if row["name"] == found["chosen"])
    assert all(row["pays"] == (row["estimated_s"] < plain) for row in rows)
    assert {row["codec"] for row in rows} in (set(), set(COLLECTIVE_CODECS))
    names = [row["codec"] + " between hosts" * row["between_hosts"] for row in rows]
    assert (min(zip((row["estimated_s"] for row in rows), names, strict=True))[1] if best else None) == best
    table = " ".join(runner.invoke(app, command).output.split())
    assert why in table
    assert (f"{best} <-" in table) == (best is not None)


def test_explain_names_the_rate_of_the_link_below_which_a_codec_pays() -> None:
    def explain(*more: str) -> dict[str, Any]:
        options = ["explain", "alltoall", "4MiB", "--hosts", "2", "--ranks", "2", "--codec", "int8", *more]
        (row,) = json.loads(runner.invoke(app, [*options, "--json"]).output)["codecs"]
        return dict(row)

    gbit = explain()["pays_below_bytes_per_s"] * 8e-9
    assert explain("--gbit", str(gbit * 0.99))["pays"]
    assert not explain("--gbit", str(gbit * 1.01))["pays"]
    # Random numbers take time, so the link must be slower.
    assert explain("--stochastic")["pays_below_bytes_per_s"] * 8e-9 < gbit


def test_explain_counts_the_bytes_of_another_type() -> None:
    options = ["explain", "allreduce", "64MiB", "--hosts", "4", "--ranks", "32", "--json"]
    narrow, wide = (
        {row["name"]: row for row in json.loads(runner.invoke(app, [*options, *more]).output)["algorithms"]}
        for more in (["--dtype", "bfloat16"], [])
    )
    # Partial sums of 16-bit elements are float32.
    sent = "sent_to_other_hosts_bytes"
    assert narrow["hierarchical"][sent] == 1.5 * wide["hierarchical"][sent]
    assert narrow["direct"][sent] == wide["direct"][sent]


def test_explain_uses_the_constants_of_a_file_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    way = {"round_s": 1.0, "message_s": 0, "byte_s": 0, "peer_share": 0, "fold_byte_s": 0}
    path = tmp_path / "slow.json"
    path.write_text(json.dumps({"schema": 1, "ways": {"shared_memory": way, "network": way}}))
    options = ["explain", "allreduce", "4KiB"]
    assert "Constants of the model: built-in defaults" in runner.invoke(app, options).output
    monkeypatch.setenv("SENNIT_CALIBRATION", str(path))
    found = json.loads(runner.invoke(app, [*options, "--json"]).output)
    assert found["constants"] == str(path)
    assert {row["name"]: row["estimated_s"] for row in found["algorithms"]}["direct"] == 2.0
    assert "slow.json" in runner.invoke(app, options).output
    path.write_text("{}")
    result = runner.invoke(app, options)
    assert result.exit_code == 1
    assert result.output == f"error: calibration file {path}: field schema is missing; {REMEDY}\n"


def test_version_names_sennit_and_torch() -> None:
    result = runner.invoke(app, ["version"])
    assert result.exit_code == 0
    assert f"sennit {sennit.__version__}" in result.output
    assert "torch" in result.output


def test_words_are_completed() -> None:
    """What the lines of `sennit --show-completion` ask in a shell."""
    for words, last, expected in (("sennit build-e", 1, "build-extension"), ("sennit explain --ra", 2, "--ranks")):
        variables = {"_SENNIT_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(last)}
        done = runner.invoke(app, [], env=variables, prog_name="sennit")
        assert done.stdout.split() == [expected], done.output


def test_doctor_prints_json_that_agrees_with_its_status() -> None:
    result = runner.invoke(app, ["doctor", "--json"])
    assert json.loads(result.stdout)["healthy"] == (result.exit_code == 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sizes", "12XB"], "KiB"),
        (["--world", "1"], "world"),
        (["--against", "nccl"], "openmpi"),
        (["--only", "sort"], "sort"),
        (["--json", "/proc/none/report.json"], "cannot be written"),
        (["--plot", "/proc/none/figure.png"], "cannot be written"),
        (["--plot", "figure.txt"], ".png, .svg, .pdf"),
    ],
)
def test_wrong_benchmark_options_are_explained(options: list[str], message: str) -> None:
    result = runner.invoke(app, ["bench", "collectives", *options])
    assert result.exit_code == 2
    assert message in result.output


def test_help_imports_nothing_that_takes_long() -> None:
    program = (
        "import sys\n"
        "from sennit.commands.cli import app\n"
        "try:\n    app(['--help'])\nexcept SystemExit:\n    pass\n"
        "late = {'torch', 'numpy', 'rich.progress', 'rich.table', 'rich.markdown', 'urllib.request'} & {*sys.modules}\n"
        "assert not late, late\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, stdout=subprocess.DEVNULL)


def test_module_and_command_are_the_same() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sennit", "version"], check=True, timeout=60, capture_output=True, text=True
    )
    assert done.stdout == runner.invoke(app, ["version"]).output


def test_brackets_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("peer", "why not")
    table.add_row("OpenMPI", "pip install 'sennit[mpi]'")
    command_line.stdout_console().print(table)
    command_line.stdout_console().print("a trainer at [fd00::1]:4791")
    shown = capsys.readouterr().out
    assert "pip install 'sennit[mpi]'" in shown
    assert "[fd00::1]:4791" in shown


def test_json_has_null_for_what_is_no_number() -> None:
    content = {"auc": math.nan, "rates": [math.inf, -math.inf, 0.5], "where": Path("here"), "who": "Jörg"}
    text = command_line.json_text(content)
    assert json.loads(text) == {"auc": None, "rates": [None, None, 0.5], "where": "here", "who": "Jörg"}
    assert "Jörg" in text
    assert text.endswith("}\n")
