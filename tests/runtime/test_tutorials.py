# SPDX-License-Identifier: Apache-2.0
"""Programs of the README and of the tutorials do what the pages say."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TUTORIAL = ROOT / "docs" / "tutorials" / "first-allreduce.md"
BLOCK = r"```python\n(.*?)```"
DEADLINE_S = 120.0


def torchrun(folder: Path, name: str, ranks: int, **environment: str) -> list[str]:
    """Returns the lines that the ranks print, rank by rank. Each rank has its own file, so no lines are mixed."""
    options = ["--standalone", f"--nproc-per-node={ranks}", "--log-dir", str(folder / "logs"), "--redirects", "1"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, name]
    variables = {"OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin", **environment}
    subprocess.run(command, cwd=folder, env=variables, timeout=DEADLINE_S, check=True)
    return [line for path in (folder / "logs").rglob("stdout.log") for line in path.read_text().splitlines()]


def program(page: Path, name: str) -> str:
    """Returns the first block of Python after "Save this as `name`"."""
    found = re.search(rf"Save this as `{re.escape(name)}`.*?{BLOCK}", page.read_text(), re.DOTALL)
    assert found, f"{page.name} has no {name}"
    return found[1]


def of_readme(number: int, *, lines: int) -> str:
    """A block of Python of the README, which has at most so many lines."""
    block: str = re.findall(BLOCK, (ROOT / "README.md").read_text(), re.DOTALL)[number]
    assert len([line for line in block.splitlines() if line.strip()]) <= lines
    return block


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "route"), [({}, "shm"), ({"SENNIT_TRANSPORT": "udp", "SENNIT_INTERFACES": "lo"}, "udp")]
)
def test_the_first_allreduce(tmp_path: Path, environment: dict[str, str], route: str) -> None:
    (tmp_path / "allreduce.py").write_text(program(TUTORIAL, "allreduce.py"))
    lines = torchrun(tmp_path, "allreduce.py", 2, **environment)
    expected = [f"rank {rank} of 2: [3.0, 3.0, 3.0, 3.0]" for rank in range(2)]
    assert sorted(lines) == sorted([*expected, f"routes: self {route}", f"routes: {route} self"])
    assert set(lines) <= set(TUTORIAL.read_text().splitlines())


@pytest.mark.slow
def test_survivors_name_the_rank_that_is_gone(tmp_path: Path) -> None:
    (tmp_path / "lost.py").write_text(program(TUTORIAL, "lost.py"))
    lines = torchrun(tmp_path, "lost.py", 3)
    assert {line.partition(":")[0] for line in lines} == {"rank 0", "rank 2"}
    assert all("rank 1 process ended" in line for line in lines)


@pytest.mark.slow
def test_the_program_of_the_readme(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(of_readme(1, lines=15))
    assert sorted(torchrun(tmp_path, "program.py", 2)) == ["0 1.0 [0.0, 10.0]", "1 1.0 [1.0, 11.0]"]


@pytest.mark.slow
@pytest.mark.timeout(3 * DEADLINE_S)
def test_the_model_of_the_readme_has_the_same_digests_with_any_number_of_ranks(tmp_path: Path) -> None:
    printed = []
    for ranks in (1, 2, 3):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        (folder / "program.py").write_text(of_readme(0, lines=24))
        printed += torchrun(folder, "program.py", ranks)
    assert len(printed) == 6
    (line,) = set(printed)
    assert re.fullmatch(r"loss 0\.\d{6}, digests [0-9a-f]{16} [0-9a-f]{16}", line)
