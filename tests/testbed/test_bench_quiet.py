# SPDX-License-Identifier: Apache-2.0
"""Figures are written on a quiet machine only, or say that it was busy; then no page takes them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from sennit.commands.cli import app
from sennit.testbed.bench import comparison_page, quiet
from sennit.testbed.bench.command_line import app as bench
from sennit.testbed.bench.figures import performance_page
from sennit.testbed.bench.figures.figures import Figures
from sennit.testbed.bench.training import planner_scale, quality_page

DOCS = Path(__file__).resolve().parents[2] / "docs"
# The first has no figures of pages, and no figure of the second is a time.
WITHOUT = {"gpu", "drift"}


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Says what others use, at the start, at the end and in between, and makes the benchmark a quick one."""

    def say(*used: float, between: float = 0.05) -> None:
        left: Iterator[float] = iter(used)
        monkeypatch.setattr(quiet, "others", lambda: next(left))
        monkeypatch.setattr(quiet.Use, "others_since", lambda self, before: between)

    monkeypatch.setattr(planner_scale, "run", lambda: None)
    monkeypatch.setattr(planner_scale, "render", lambda *_: None)
    monkeypatch.setattr(planner_scale, "as_json", lambda _: {"figure": 7})
    return say


def run(path: Path, *options: str) -> Any:
    return CliRunner().invoke(app, ["bench", "planner", "--large", "--json", str(path), *options])


def test_a_quiet_machine_stands_beside_the_figures(load: Callable[..., None], tmp_path: Path) -> None:
    load(0.02, 0.1)
    result = run(tmp_path / "found.json")
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "found.json").read_text()) == {
        "figure": 7,
        "others": [0.02, 0.05, 0.1],
        "busy": False,
    }


@pytest.mark.parametrize(
    ("used", "between", "told"),
    [
        ((1.3,), 0.0, "Nothing was measured"),
        ((0.0, 0.0), 1.3, "Nothing was written"),
        ((0.0, 1.3), 0.0, "Nothing was written"),
    ],
    ids=["before", "between", "after"],
)
def test_a_busy_machine_writes_nothing_and_says_what_to_do(
    used: tuple[float, ...], between: float, told: str, load: Callable[..., None], tmp_path: Path
) -> None:
    load(*used, between=between)
    result = run(tmp_path / "found.json")
    assert result.exit_code == 1
    said = " ".join(result.output.split())
    assert "other processes use 1.3 of " in said
    assert f"processors; allowed for figures: up to 0.2. {told}. Wait until the machine is quiet" in said
    assert "or give --force" in said
    assert not (tmp_path / "found.json").exists()


@pytest.mark.parametrize("used", [(1.3, 0.0), (0.0, 1.3)])
def test_forced_figures_say_that_the_machine_was_busy(
    used: tuple[float, float], load: Callable[..., None], tmp_path: Path
) -> None:
    load(*used)
    assert run(tmp_path / "found.json", "--force").exit_code == 0
    assert json.loads((tmp_path / "found.json").read_text()) == {
        "figure": 7,
        "others": [used[0], 0.05, used[1]],
        "busy": True,
    }


def test_what_is_only_shown_needs_no_quiet_machine(load: Callable[..., None]) -> None:
    load()  # nobody asks
    assert CliRunner().invoke(app, ["bench", "planner", "--large"]).exit_code == 0


def test_every_command_that_writes_figures_looks_at_the_load() -> None:
    commands = typer.main.get_group(bench).commands
    assert len(commands) > 15
    for name, command in commands.items():
        options = {option for parameter in command.params for option in parameter.opts}
        assert options & {"--json", "--report"}, name
        assert ("--force" in options) == (name not in WITHOUT), name


def test_a_process_that_computes_is_seen_and_our_own_time_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    # Its parent ends at once, so it is nobody's of us.
    shell = f"{sys.executable} -c 'while True: pass' >/dev/null 2>&1 & echo $!"
    stranger = int(subprocess.run(["sh", "-c", shell], capture_output=True, text=True, check=True, timeout=60).stdout)
    try:
        assert quiet.others() > quiet.OTHERS_MAX
    finally:
        os.kill(stranger, signal.SIGKILL)
    busy_s, own_s = iter([100.0, 101.5]), iter([7.0, 8.5])
    monkeypatch.setattr(quiet, "WINDOW_S", 0.0)
    monkeypatch.setattr(quiet, "_busy_s", lambda: next(busy_s))
    monkeypatch.setattr(quiet, "_own_s", lambda: next(own_s))
    assert quiet.others() == 0


def test_what_children_and_theirs_use_is_our_own_before_and_after_they_end() -> None:
    """A child of a child that computes, and which nobody of us waits for while it lives."""
    program = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
    inner = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {program!r}])"
    before_s = quiet._own_s()
    with subprocess.Popen([sys.executable, "-c", inner], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert quiet._own_s() - before_s >= 0.25
        child.communicate(b"\n", timeout=60)
    assert quiet._own_s() - before_s >= 0.25


def busy_performance(folder: Path) -> Callable[[], object]:
    found = json.loads((DOCS / performance_page.FIGURES).read_text())
    next(run for run in found["runs"].values() if "measured" in run)["others"] = [0.0, 1.3]
    path = folder / performance_page.FIGURES
    path.write_text(json.dumps(found))
    return lambda: Figures.read(path)


def busy_comparison(folder: Path) -> Callable[[], object]:
    found = json.loads((DOCS / comparison_page.FIGURES).read_text())
    (folder / comparison_page.FIGURES).write_text(json.dumps({**found, "others": [1.3, 0.0]}))
    return lambda: comparison_page.made_anew(folder)


def busy_quality(folder: Path) -> Callable[[], object]:
    found = json.loads((DOCS / quality_page.FIGURES).read_text())
    found[1] |= {"others": [1.3, 1.3]}
    path = folder / quality_page.FIGURES
    path.write_text(json.dumps(found))
    return lambda: quality_page.read(path)


@pytest.mark.parametrize("page", [busy_performance, busy_comparison, busy_quality])
def test_no_page_is_made_of_figures_of_a_busy_machine(
    page: Callable[[Path], Callable[[], object]], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"measured while others used 1\.3 processors; .* Measure again, without"):
        page(tmp_path)()


def test_no_page_is_made_of_times_that_do_not_say_how_busy_others_were(tmp_path: Path) -> None:
    read = busy_performance(tmp_path)
    path = tmp_path / performance_page.FIGURES
    found = json.loads(path.read_text())
    for run in found["runs"].values():
        run.pop("others", None)
    path.write_text(json.dumps(found))
    with pytest.raises(ValueError, match=r"does not say how busy others were .* Measure again"):
        read()
