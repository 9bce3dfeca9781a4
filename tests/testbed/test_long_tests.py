# SPDX-License-Identifier: Apache-2.0
"""The long tests keep a record of what ran: each part ends in time, and the page says how."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sennit.testbed import long_tests
from sennit.testbed.long_tests import PARTS, Part
from tests import extent

DEADLINE_S = 60.0


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A record and a page of its own, with parts that take no time."""
    parts = {
        "good": Part(what="what passes", command=("-c", "print('3 passed, seed {seed}')"), limit_s=60),
        "bad": Part(what="what fails", command=(sys.executable, "-c", "raise SystemExit(3)"), limit_s=60),
        "endless": Part(what="what hangs", command=("-c", "import time; time.sleep(600)"), limit_s=1),
    }
    page = tmp_path / "page.md"
    page.write_text(f"before\n{long_tests.BEGIN}\n{long_tests.END}\nafter\n")
    for name, value in {"PARTS": parts, "LOGS": tmp_path / "logs", "RECORD": tmp_path / "record.json"}.items():
        monkeypatch.setattr(long_tests, name, value)
    plans = tmp_path / "plans.md"
    plans.write_text(f"{long_tests.PLANS_BEGIN}\n{long_tests.PLANS_END}\n")
    monkeypatch.setattr(long_tests, "PAGE", page)
    monkeypatch.setattr(long_tests, "PLANS", plans)
    monkeypatch.setattr(long_tests, "ROOT", tmp_path.parent)
    monkeypatch.setattr(long_tests, "_commit", lambda: "abc1234")
    return page


def test_a_part_that_fails_or_hangs_stops_no_other(record: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert long_tests.main(["--seed", "7", "--parts", "endless, bad,good"]) == 1
    found = json.loads(long_tests.RECORD.read_text())
    assert {name: one["outcome"] for name, one in found.items()} == {
        "endless": "took too long", "bad": "failed (3)", "good": "passed"
    }  # fmt: skip
    assert found["good"]["said"] == "3 passed, seed 7"
    assert "failed: endless, bad" in capsys.readouterr().out
    text = " ".join(record.read_text().split())
    assert "abc1234" in text
    assert "seed 7: passed (3 passed, seed 7)" in text
    assert text.startswith("before")
    assert text.endswith("after")


def test_the_page_of_plans_says_what_was_replayed(record: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the words of the test, which stand before pytest's last line."""
    said = "10,000,000 batches, 0 wrong; 3 duplicates, 2 malformed, 1 busy"
    part = Part(
        what="",
        command=("-c", f"print('{said}'); print('500 passed')"),
        limit_s=60,
        says=PARTS[long_tests.REPLAYED].says,
    )
    monkeypatch.setitem(long_tests.PARTS, long_tests.REPLAYED, part)
    assert long_tests.main(["--parts", "good"]) == 0
    assert "have not been run yet" in long_tests.PLANS.read_text()
    assert long_tests.main(["--parts", long_tests.REPLAYED]) == 0
    assert f"passed; {said}." in " ".join(long_tests.PLANS.read_text().split())


def test_the_pages_are_those_of_the_record() -> None:
    record = json.loads(long_tests.RECORD.read_text())
    assert long_tests.listed(record) in long_tests.PAGE.read_text()
    assert long_tests.replayed(record) in long_tests.PLANS.read_text()


def test_parts_that_do_not_run_keep_their_entries(record: Path) -> None:
    assert long_tests.main(["--parts", "bad"]) == 1
    assert "what passes. Never run." in record.read_text()
    assert long_tests.main(["--parts", "good"]) == 0
    assert json.loads(long_tests.RECORD.read_text()).keys() == {"bad", "good"}


def test_an_unknown_part_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        long_tests.main(["--parts", "model,none"])
    assert "no part 'none'; allowed: collectives, kernels" in capsys.readouterr().err


def test_processor_time_of_orphans_counts(record: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The part ends when its grandchild has used a second, whose parent has ended long before."""
    spin = "import time\nwhile time.process_time() < 1: pass\n"
    orphan = f"import os\nif os.fork():\n os._exit(0)\n{spin}os.write(1, b'x')"
    command = ("-c", f"import subprocess as s, sys; s.run([sys.executable, '-c', {orphan!r}], stdout=s.PIPE)")
    monkeypatch.setitem(long_tests.PARTS, "spins", part := Part(what="", command=command, limit_s=60))
    entry = long_tests.run("spins", part, 1)
    assert (entry["outcome"], entry["processor_s"] >= 1) == ("passed", True), entry


def test_a_signal_to_the_runner_ends_the_part_too(tmp_path: Path) -> None:
    """The part holds the other end of a pipe, which ends when it does."""
    read, write = os.pipe()
    program = (
        "import sys; from pathlib import Path; from sennit.testbed import long_tests as l\n"
        f"l.LOGS = Path({str(tmp_path)!r})\n"
        f"endless = ('-c', 'import os, time; os.write({write}, b\"here\"); time.sleep(600)')\n"
        "l.PARTS = {'endless': l.Part(what='', command=endless, limit_s=600)}\n"
        "from subprocess import Popen\n"
        f"l.subprocess.Popen = lambda *a, **b: Popen(*a, **b, pass_fds=[{write}])\n"
        "sys.exit(l.main([]))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], pass_fds=[write], stdout=subprocess.DEVNULL)
    os.close(write)
    with open(read, "rb") as output:
        assert output.read(4) == b"here"
        process.terminate()
        assert process.wait(DEADLINE_S) == 128 + signal.SIGTERM
        assert output.read() == b""
    assert (tmp_path / "endless.log").exists()


def test_each_file_of_tests_is_in_one_part() -> None:
    parts = [set(long_tests.files_of(name)) for name in PARTS]
    found = {path.relative_to(long_tests.ROOT).as_posix() for path in long_tests.ROOT.glob("tests/**/test_*.py")}
    # They have parts of their own: "frameworks", those over RDMA, "random calls" and "callbacks".
    others = {path for path in found if path.startswith(("tests/runtime/frameworks/", "tests/rdma/"))}
    assert set().union(*parts) == found - others - {long_tests.RANDOM_CALLS}
    assert sum(map(len, parts)) == len(set().union(*parts))
    assert [name for name, files in zip(PARTS, parts, strict=True) if files] == [
        name for name, part in PARTS.items() if part.files
    ]


def test_the_record_of_parts_before_is_no_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = {"ROOT": tmp_path, **{name: tmp_path / name for name in ("RECORD", "PAGE", "PLANS")}}
    for name, path in paths.items():
        monkeypatch.setattr(long_tests, name, path)
    for path in (tmp_path / "source", long_tests.RECORD, long_tests.PAGE, long_tests.PLANS):
        path.write_text("before")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "c"]):
        subprocess.run([*git, *command], check=True)
    long_tests.RECORD.write_text("after")
    long_tests.PAGE.write_text("after")
    assert " and changes" not in long_tests._commit()
    (tmp_path / "source").write_text("after")
    assert long_tests._commit().endswith(" and changes")


def test_the_long_tests_draw_ten_times_as_many_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extent, "is_long", False)
    assert extent.examples(7).max_examples == 7
    monkeypatch.setattr(extent, "is_long", True)
    assert extent.examples(7).max_examples == 70
    here = Path(__file__).resolve()
    others = [path for path in here.parents[1].rglob("test_*.py") if path != here]
    assert not [path for path in others if "max_examples" in path.read_text()]


@pytest.mark.long
def test_a_long_test_that_names_no_limit_has_more_time_than_others(request: pytest.FixtureRequest) -> None:
    limit = request.node.get_closest_marker("timeout")
    assert limit is not None
    assert limit.args[0] > float(request.config.getini("timeout"))


def test_the_page_is_made_from_the_record() -> None:
    page, found = long_tests.PAGE.read_text(), json.loads(long_tests.RECORD.read_text())
    assert f"{long_tests.BEGIN}\n{long_tests.listed(found)}\n{long_tests.END}" in page
    assert found.keys() <= PARTS.keys()
