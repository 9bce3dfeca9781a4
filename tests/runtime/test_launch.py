# SPDX-License-Identifier: Apache-2.0
"""The ranks of one machine: what they get from the process that starts them, and what it tells of their end."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sennit.runtime.training.launch import RankFailure, run_ranks, serve_store

HERE = str(Path(__file__).parent)
TIMEOUT_S = 30.0
LAUNCHER = f"""
import launch_cases
from sennit.runtime.training.launch import run_ranks, serve_store
store, address = serve_store(0, timeout_s={TIMEOUT_S})
run_ranks(launch_cases.wait_to_be_ended, "{TIMEOUT_S}", 2, address=address, store_timeout_s={TIMEOUT_S})
"""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], list[Any]]:
    """`run(name, argument)`: the results of two ranks that run this function of launch_cases.py."""
    monkeypatch.syspath_prepend(HERE)

    def results(name: str, argument: str) -> list[Any]:
        function = getattr(importlib.import_module("launch_cases"), name)
        store, address = serve_store(0, timeout_s=TIMEOUT_S)
        found = run_ranks(function, argument, 2, address=address, store_timeout_s=TIMEOUT_S)
        del store
        return found

    return results


def test_ranks_have_the_environment_of_their_run_and_come_from_a_process_without_threads(
    run: Callable[[str, str], list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    for value in ("first", "second"):
        monkeypatch.setenv("SENNIT_OF_A_TEST", value)
        assert run("surroundings", "SENNIT_OF_A_TEST") == [(value, "1", 1)] * 2
    assert os.environ["OMP_NUM_THREADS"] == "7"


@pytest.mark.parametrize(("how", "told"), [("killed", "signal 9"), ("leaves", "status 3")])
def test_a_rank_that_ends_without_a_word_is_told_with_its_signal_or_status(
    run: Callable[[str, str], list[Any]], how: str, told: str
) -> None:
    with pytest.raises(RankFailure, match=rf"^rank [01]: process ended with {told}$"):
        run("end_at_once", how)


def test_ranks_end_when_the_process_that_started_them_is_killed() -> None:
    command, environment = [sys.executable, "-c", LAUNCHER], {**os.environ, "PYTHONPATH": HERE}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as launcher:
        try:
            assert launcher.stdout is not None
            assert [launcher.stdout.readline() for _ in range(2)] == ["here\n"] * 2
        finally:
            launcher.kill()
        # Its end is that of the last process that has it.
        assert launcher.stdout.read() == ""


def test_a_command_that_starts_ranks_does_not_import_torchs_compiler() -> None:
    """It takes a second of processor time, and only the ranks need it, which are forks of one process that has it."""
    program = "import sys, sennit.runtime.training.command; assert 'torch._dynamo' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
