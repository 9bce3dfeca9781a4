# SPDX-License-Identifier: Apache-2.0
"""The README and the tutorials do what they say: their programs, and their commands in the order of the page.

The tutorial on tracing is run by tests/testbed/test_trace_tutorial.py. `make test` runs the README's programs, and
parses the commands of all pages (tests/test_code_blocks.py).
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import pages
from tests.runtime.programs import run_ranks

README = pages.ROOT / "README.md"
TUTORIALS = pages.ROOT / "docs" / "tutorials"
DEADLINE_S = 120.0


def program_of_readme(folder: Path, number: int, *, lines: int) -> Path:
    """A block of Python of the README, which has at most so many lines, as a file."""
    text = [block.text for block in pages.blocks(README) if block.language == "python"][number]
    assert len([line for line in text.splitlines() if line.strip()]) <= lines
    (folder / "program.py").write_text(text)
    return folder / "program.py"


@pytest.mark.slow
def test_the_program_of_the_readme(tmp_path: Path) -> None:
    program = program_of_readme(tmp_path, 1, lines=15)
    printed = run_ranks(program, 2, tmp_path, deadline_s=DEADLINE_S)
    assert printed.splitlines() == ["0 1.0 [0.0, 10.0]", "1 1.0 [1.0, 11.0]"]


@pytest.mark.slow
@pytest.mark.timeout(3 * DEADLINE_S)
def test_the_model_of_the_readme_has_the_same_digests_with_any_number_of_ranks(tmp_path: Path) -> None:
    program = program_of_readme(tmp_path, 0, lines=24)
    printed = [run_ranks(program, ranks, tmp_path, deadline_s=DEADLINE_S).splitlines() for ranks in (1, 2, 3)]
    assert [len(lines) for lines in printed] == [1, 2, 3]
    (line,) = {line for lines in printed for line in lines}
    assert re.fullmatch(r"loss 0\.\d{6}, digests [0-9a-f]{16} [0-9a-f]{16}", line)


@pytest.mark.long
@pytest.mark.timeout(2 * DEADLINE_S)
def test_first_allreduce(tmp_path: Path) -> None:
    page = TUTORIALS / "first-allreduce.md"
    printed = pages.run(page, tmp_path, deadline_s=2 * DEADLINE_S)
    shm, udp, lost = [block for block in pages.blocks(page) if block.line in printed]
    for block in (shm, udp):
        assert sorted(printed[block.line]) == sorted(block.shown.splitlines())
    told = [line.partition(" process ended")[0] for line in lost.shown.splitlines()]
    assert sorted(line.partition(" process ended")[0] for line in printed[lost.line]) == told


@pytest.mark.long
@pytest.mark.timeout(8 * DEADLINE_S)
def test_first_training_run(tmp_path: Path) -> None:
    """With 8 steps in place of 286."""
    page = TUTORIALS / "first-training-run.md"
    shorter = {"--data flights": "--data flights --steps 8", "every 143": "every 4", "000286": "000008"}
    shorter["--epochs 3"] = "--steps 12"
    printed = pages.run(page, tmp_path, deadline_s=7 * DEADLINE_S, shorter=shorter)
    first, listed, resumed, gloo, converted = printed.values()
    assert listed == ["step-000000004", "step-000000008"]

    def reported(lines: list[str], name: str) -> str:
        (line,) = [line for line in lines if line.startswith(f"{name}  ")]
        return line.removeprefix(name).strip()

    for lines, ranks, steps in ((first, "2 over sennit", "1 to 8"), (gloo, "2 over gloo", "1 to 8")):
        assert reported(lines, "ranks") == ranks
        assert reported(lines, "steps").startswith(f"{steps},")
    assert reported(converted, "steps").startswith("9 to 12,")
    assert reported(resumed, "ranks") == "3 over sennit"
    assert reported(resumed, "steps").startswith("5 to 8,")
    for name in ("AUC", "normalised entropy", "weights SHA-256"):
        assert reported(first, name) == reported(resumed, name) == reported(gloo, name)
    assert re.fullmatch(r"[0-9a-f]{64}", reported(first, "weights SHA-256"))
    for name in ("data", "AUC", "normalised entropy", "speed"):
        assert reported(first, name)


@pytest.mark.long
@pytest.mark.timeout(3 * DEADLINE_S)
def test_move_your_model(tmp_path: Path) -> None:
    printed = list(pages.run(TUTORIALS / "move-your-model.md", tmp_path, deadline_s=3 * DEADLINE_S).values())
    plain, over_ddp, one, three = printed
    assert [len(lines) for lines in printed] == [4, 4, 5, 5]
    assert plain == over_ddp
    assert one == three
    assert re.fullmatch(r"digests [0-9a-f]{16} [0-9a-f]{16}", one[-1])


STREAM = TUTORIALS / "train-on-a-stream.md"
SHORTER_STREAM = {
    "range(8640)": "range(240)", "seconds=10": "seconds=360", "--batch-size 256": "--batch-size 64",
    "--steps 120": "--steps 12",
}  # fmt: skip
DAYS = [f"2026-11-{day:02}" for day in range(2, 8)]


def days(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("2026-11-")]


@pytest.mark.timeout(2 * DEADLINE_S)
def test_the_tutorial_goes_from_raw_logs_to_metrics_by_day(tmp_path: Path) -> None:
    """With 240 rows a day. Every `make test` runs it: no other program does that. Stops: stream/test_running.py."""
    end = "## 4. Stop, and go on with more ranks"
    printed = pages.run(STREAM, tmp_path, deadline_s=2 * DEADLINE_S, shorter=SHORTER_STREAM, until=end)
    *_, told = printed.values()
    assert [line[:10] for line in days(told)] == DAYS


@pytest.mark.long
@pytest.mark.timeout(3 * DEADLINE_S)
def test_train_on_a_stream(tmp_path: Path) -> None:
    printed = list(pages.run(STREAM, tmp_path, deadline_s=3 * DEADLINE_S, shorter=SHORTER_STREAM).values())
    whole, parts, told = printed[-3:]
    assert [line[:10] for line in days(whole)] == DAYS
    assert days(parts)[-2:] == days(whole)[-2:]
    assert any(line.startswith("resumes run ") for line in parts)
    digests = [line for line in parts + whole if line.startswith("weights SHA-256")]
    assert len({line.strip() for line in digests[1:]}) == 1
    assert [line.split()[0] for line in told] == DAYS
