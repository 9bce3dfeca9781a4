# SPDX-License-Identifier: Apache-2.0
"""`sennit testbed`: exit codes, the results for other programs, the page. Runs no scenario."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

pytest.importorskip("pyroute2", reason="the extra `testbed` is not installed")

from sennit.commands.cli import app
from sennit.doctor import capabilities
from sennit.testbed.scenarios import report_page, results, runner, stage
from sennit.testbed.scenarios.catalogue import SCENARIOS
from sennit.testbed.scenarios.model import Library, Variant
from sennit.testbed.scenarios.ranks import RankError
from sennit.testbed.scenarios.stage import Observations, Run
from tests import browser


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["testbed", *arguments])


def play(wrong_elements: int = 0) -> Any:
    """Takes the place of `stage.play`. Every rank gets its results, with this many wrong elements."""

    def made(scenario: Any, *, impairer: Any, seed: int, folder: Path, say: Any) -> Observations:
        say("topology")
        (folder / "sennit-rank0.log").write_text("a line <b>of</b> a log\n")
        samples = [(step / 1000, step * 1000.0, *[step * 250.0] * scenario.topology.planes) for step in range(200)]
        answers = [
            {
                "begins_s": [0.0, 0.1],
                "ends_s": [0.1, 0.2],
                "wrong_elements": [0, wrong_elements],
                "digest": "d",
                "received_bytes": {"plane0": 3, "plane1": 1},
                "samples": samples if scenario.workload.timeline else [],
            }
            for _ in range(scenario.topology.hosts)
        ]
        runs = [
            Run(
                library=library,
                disturbed=disturbed,
                variant=Variant(),
                round=0,
                answers=answers,
                events=[("plane 1 down", 0.05), ("plane 1 up", 0.15)][: len(scenario.faults)],
                impairment_counters={"dropped": 5, "corrupted": 0},
                queue_counters={},
                rank_counters=[{"bad_icrc": 2}] * scenario.topology.hosts,
            )
            for library in (*scenario.libraries[1:], Library.SENNIT)
            for disturbed in ([False, True] if scenario.beside_calm else [True])
        ]
        return Observations(scenario=scenario, seed=seed, runs=runs, log_tails={"rank0.log": "a line <b>of</b> a log"})

    return made


@pytest.fixture
def can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capabilities, "missing", lambda *names: None)


def test_list_names_every_scenario() -> None:
    listed = invoke("list")
    assert listed.exit_code == 0
    assert all(name in listed.stdout for name in SCENARIOS)


def test_passed_cases_exit_with_0_and_leave_results_and_a_page(
    can_run: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(stage, "play", play())
    names = ["loss-1-allreduce", "loss-5-alltoall", "plane-off"]
    done = invoke("run", *names, "--folder", str(tmp_path / "out"), "--json", str(tmp_path / "copy.json"))
    assert done.exit_code == 0, done.output
    assert "3 passed, 0 failed, 0 unsupported" in done.stdout
    written = json.loads((tmp_path / "out" / "results.json").read_text())
    assert written == json.loads((tmp_path / "copy.json").read_text())
    assert [case["name"] for case in written["cases"]] == names
    assert written["schema"] == results.SCHEMA
    goal = next(goal for goal in written["cases"][0]["goals"] if goal["measure"] == "goodput_kept")
    assert goal == {
        "measure": "goodput_kept", "at_least": 0.92, "at_most": None, "must": False,
        "text": "≥ 0.92", "value": 1.0, "met": True, "word": "met",
    }  # fmt: skip
    assert written["cases"][0]["files"] == ["loss-1-allreduce/sennit-rank0.log"]

    html = (tmp_path / "out" / "report.html").read_text()
    assert html.count("<svg") == 3  # loss, timeline, shares
    # Readable on a dark page too: all text has the page's colour, and matplotlib writes no colour for its own black.
    texts = re.findall(r"<text [^>]*>", html)
    assert texts
    assert not [text for text in texts if "fill: currentColor" not in text]
    # The page fetches nothing: its links lead into it, or to the logs beside it.
    assert set(re.findall(r'(?:src|href)="([^#"][^"]*)"', html)) == {f"{name}/sennit-rank0.log" for name in names}
    assert "a line &lt;b&gt;of&lt;/b&gt; a log" in html
    # Every link target exists exactly once: every case and the meaning of every measure.
    targets = re.findall(r'id="([^"]+)"', re.sub(r"<svg.*?</svg>", "", html, flags=re.DOTALL))
    assert len(targets) == len(set(targets))
    assert set(re.findall(r'href="#([^"]+)"', re.sub(r"<svg.*?</svg>", "", html, flags=re.DOTALL))) <= set(targets)
    assert {*names, "measure-goodput_kept", "measure-impairment."} <= set(targets)
    # A library as fast as gloo misses its goal, and the first line says so.
    assert re.search(r"<h1>.*3 passed.*2 short of a goal about speed", html)
    again = invoke("report", "--folder", str(tmp_path / "out"), "--html", str(tmp_path / "new" / "again.html"))
    assert again.exit_code == 0, again.output
    assert (tmp_path / "new" / "again.html").read_text() == html


@pytest.mark.needs("chromium")
def test_the_browser_sees_what_is_wrong_with_a_page(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.html"
    wrong.write_text(
        '<!doctype html><p style="width: 900px; font-size: 8px">x</p><img src="http://elsewhere.test/a.png"><script>nothing()</script>'
        '<div style="overflow-x: auto"><pre>' + 100 * "wide" + "</pre></div>"
    )
    seen = browser.look(wrong, tmp_path)
    assert (seen.wide_px > 900, seen.small_px) == (True, 8)
    assert seen.fetched == ["http://elsewhere.test/a.png"]
    assert [part.partition(" ")[0] for part in seen.sideways] == ["<div"]
    assert any("nothing is not defined" in complaint for complaint in seen.complaints)


@pytest.mark.needs("chromium")
def test_the_page_can_be_read_on_a_phone(can_run: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(stage, "play", play())
    done = invoke("run", "loss-1-allreduce", "loss-5-alltoall", "plane-off", "--folder", str(tmp_path / "out"))
    assert done.exit_code == 0, done.output
    seen = browser.look(tmp_path / "out" / "report.html", tmp_path)
    assert seen.wide_px <= browser.PHONE_PX
    assert seen.high_px > 2_000
    assert seen.small_px >= 12
    assert not [part for part in seen.sideways if not part.startswith("<pre>")]  # commands and JSON are
    assert not seen.fetched
    assert not seen.complaints


def test_a_wrong_result_exits_with_1(can_run: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(stage, "play", play(wrong_elements=1))
    done = invoke("run", "lossless-allreduce", "--folder", str(tmp_path))
    assert done.exit_code == 1
    assert "wrong_results is 4, must be ≤ 0" in done.stdout


def test_strict_lets_speed_decide(can_run: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(stage, "play", play())
    # As fast as gloo, but the goal is 2.5 times as fast.
    arguments = ["run", "lossless-allreduce", "--folder", str(tmp_path)]
    assert invoke(*arguments).exit_code == 0
    assert invoke(*arguments, "--strict").exit_code == 1


def test_a_case_that_breaks_fails_and_the_next_runs(
    can_run: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(scenario: Any, **rest: Any) -> Observations:
        if scenario.name == "same-bits":
            raise RankError("sennit rank 1 ended at join")
        result: Observations = play()(scenario, **rest)
        return result

    monkeypatch.setattr(stage, "play", broken)
    done = invoke("run", "same-bits", "lossless-alltoall", "--short", "--folder", str(tmp_path))
    assert done.exit_code == 1
    assert "RankError: sennit rank 1 ended at join" in done.stdout
    assert "1 passed, 1 failed" in done.stdout
    assert "Traceback" in (tmp_path / "same-bits" / "conductor.log").read_text()


def test_an_interrupted_run_leaves_what_is_done(can_run: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted(scenario: Any, **rest: Any) -> Observations:
        if scenario.name == "same-bits":
            raise KeyboardInterrupt
        result: Observations = play()(scenario, **rest)
        return result

    monkeypatch.setattr(stage, "play", interrupted)
    done = invoke("run", "lossless-alltoall", "same-bits", "--folder", str(tmp_path))
    assert done.exit_code != 0
    assert [case.name for case in results.read(tmp_path / "results.json").cases] == ["lossless-alltoall"]
    assert "lossless-alltoall" in (tmp_path / "report.html").read_text()


def test_files_that_cannot_be_written_are_named_before_anything_runs(
    can_run: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def must_not_run(scenario: Any, **rest: Any) -> Observations:
        raise AssertionError("it ran")

    monkeypatch.setattr(stage, "play", must_not_run)
    (tmp_path / "file").write_text("")
    wrong = str(tmp_path / "file" / "results.json")
    for arguments in (
        ["run", "same-bits", "--folder", str(tmp_path), "--json", wrong],
        ["report", "--folder", str(tmp_path), "--html", wrong],
    ):
        done = invoke(*arguments)
        assert done.exit_code == 2, done.output
        assert "cannot be written" in re.sub(r"\s+", " ", done.output)


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(capabilities, "missing", lambda *names: f"missing capability {names[0]}: not here")
    done = invoke("run", "all", "--folder", str(tmp_path))
    assert done.exit_code == 0
    assert f"{len(SCENARIOS)} unsupported" in done.stdout
    assert "missing capability root: not here" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "no-such-thing"], "there are: all, "),
        (["run"], "Missing argument"),
        (["report", "--folder", "nowhere"], "sennit testbed run"),
    ],
)
def test_wrong_commands_exit_with_2(arguments: list[str], message: str) -> None:
    done = invoke(*arguments)
    assert done.exit_code == 2
    assert message in re.sub(r"\s+", " ", done.output)


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    done = invoke("list")
    assert done.exit_code == 2
    assert "pyroute2 is not installed: pip install 'sennit[testbed]'" in done.output


def test_results_of_another_schema_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    outcome = results.Results(form="short", strict=False, seed=1, machine={})
    outcome.write(path)
    assert results.read(path) == outcome
    path.write_text(json.dumps({**outcome.as_json(), "schema": 99}))
    with pytest.raises(ValueError, match=f"no results of schema {results.SCHEMA}"):
        results.read(path)


def test_reasons_are_text_and_not_markup() -> None:
    case = results.Case(name="n", title="<script>", status="failed", reason="<i>x</i>")
    case.scenario = SCENARIOS["same-bits"].as_json()
    machine = {"processor": "p", "cores": 1, "kernel": "k", "load_average": [0.0], "time_utc": "t"}
    html = report_page.render(results.Results(form="full", strict=False, seed=1, machine=machine, cases=[case]))
    assert "<script>" not in html
    assert "&lt;i&gt;x&lt;/i&gt;" in html


def test_cases_are_judged_by_their_own_goals(can_run: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(stage, "play", play())
    case = runner.run_case(
        SCENARIOS["disorder"], short=False, strict=False, seed=1, folder=tmp_path, say=lambda what: None
    )
    # Nothing was corrupted, so the case did not test corruption.
    assert case.status == "failed"
    assert "impairment.corrupted is 0, must be ≥ 1" in case.reason
