# SPDX-License-Identifier: Apache-2.0
"""The examples print the same with any number of ranks, and use the public names alone."""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytest.importorskip("torch")

from sennit.runtime.data import Source
from sennit.runtime.data.errors import MissingPackage
from sennit.runtime.data.sources import check
from tests.extent import briefly
from tests.runtime.programs import run_ranks

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py"))
MAX_LINES = 120
DEADLINE_S = 120.0
UDP = {"SENNIT_TRANSPORT": "udp", "SENNIT_INTERFACES": "lo"}
# Example -> its data set, and arguments for a short run.
SHORT = {
    "dcnv2": ("flights", "--samples=8192"),
    "deepfm": ("flights", "--samples=8192"),
    "two_tower": ("movielens", "--steps=20"),
    "retrieval_sequences": ("movielens", "--steps=20"),
    "torchrec_dlrm": (None, "--steps=20"),
    "ray_train": ("flights", "--samples=8192"),
}
# A program of TorchRec, and the same over sennit.
FROM_TORCHREC = [EXAMPLES / "from_torchrec" / f"{name}.py" for name in ("before", "after")]
MOST_CHANGES = 10
# Ray starts the ranks of these.
BY_RAY = {"ray_train"}
RAY_DEADLINE_S = 300.0
# Programs beside a run. They have tests of their own.
NO_RANKS = {"kafka_to_files"}


def test_all_examples_are_run() -> None:
    assert set(NAMES) - NO_RANKS == SHORT.keys()


@pytest.mark.slow
@pytest.mark.timeout(4 * DEADLINE_S)
@pytest.mark.parametrize("name", briefly(sorted(set(NAMES) - BY_RAY - NO_RANKS), ["two_tower"]))
def test_an_example_prints_the_same_with_any_number_of_ranks(name: str, tmp_path: Path) -> None:
    data, *arguments = SHORT[name]
    if name == "torchrec_dlrm" and importlib.util.find_spec("torchrec") is None:
        pytest.skip("the package torchrec is not installed")
    if data is not None:
        try:
            check(Source(data=data))
        except MissingPackage as error:
            pytest.skip(str(error))
    program = EXAMPLES / f"{name}.py"
    alone = run_ranks(program, 1, tmp_path, *arguments, deadline_s=DEADLINE_S)
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)$", alone, re.MULTILINE)]
    assert losses[-1] < losses[0]
    assert re.search(r"weights [0-9a-f]{64}\n$", alone)
    assert run_ranks(program, 3, tmp_path, *arguments, deadline_s=DEADLINE_S, **UDP) == alone


def run_by_ray(name: str, workers: int, *arguments: str, **environment: str) -> str:
    """What an example prints on a Ray of its own, in namespaces that end with it and all that it started."""
    script = f'ip link set lo up && exec {sys.executable} {EXAMPLES / name}.py --workers {workers} "$@"'
    apart = ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:  # short, as Unix sockets want it
        own = {"RAY_TMPDIR": folder, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
        done = subprocess.run(
            [*apart, "bash", "-c", script, "bash", *arguments],
            env={**os.environ, **own, **environment},
            timeout=RAY_DEADLINE_S, capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.needs("ray")
@pytest.mark.timeout(2 * RAY_DEADLINE_S)
@pytest.mark.parametrize("name", sorted(BY_RAY))
def test_an_example_on_ray_prints_the_same_with_any_number_of_workers(name: str) -> None:
    source, *arguments = SHORT[name]
    assert source is not None
    try:
        check(Source(data=source))
    except MissingPackage as error:
        pytest.skip(str(error))
    two = run_by_ray(name, 2, *arguments)
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)$", two, re.MULTILINE)]
    assert losses[-1] < losses[0]
    assert re.search(r"weights [0-9a-f]{64}\n$", two)
    assert run_by_ray(name, 3, *arguments, **UDP) == two


def test_a_torchrec_program_moves_in_ten_lines() -> None:
    before, after = (path.read_text().splitlines() for path in FROM_TORCHREC)
    changes = [line for line in difflib.ndiff(before, after) if line[2:].strip()]
    removed, added = (sum(line.startswith(sign) for line in changes) for sign in "-+")
    assert 0 < max(removed, added) <= MOST_CHANGES


@pytest.mark.slow
@pytest.mark.timeout(2 * DEADLINE_S)
def test_a_torchrec_program_that_moved_trains_as_before(tmp_path: Path) -> None:
    if importlib.util.find_spec("torchrec") is None:
        pytest.skip("the package torchrec is not installed")
    found = [run_ranks(path, 2, tmp_path, deadline_s=DEADLINE_S) for path in FROM_TORCHREC]
    theirs, ours = ([float(loss) for loss in re.findall(r"loss (\d\.\d+)$", text, re.MULTILINE)] for text in found)
    assert theirs[-1] < theirs[0]
    assert ours == pytest.approx(theirs, abs=2e-5)


@pytest.mark.parametrize("name", [*sorted(set(NAMES) - NO_RANKS), "from_torchrec/after"])
def test_an_example_is_short_and_imports_public_names(name: str) -> None:
    text = (EXAMPLES / f"{name}.py").read_text()
    assert len(text.splitlines()) <= MAX_LINES
    ours = [
        (node.module, alias.name)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith("sennit")
        for alias in node.names
    ]
    assert ours
    for module, imported in ours:
        room = importlib.import_module(module)
        assert hasattr(room, "__path__"), f"{module} is a file inside a room"
        assert hasattr(room, imported)
