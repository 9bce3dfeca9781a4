# SPDX-License-Identifier: Apache-2.0
"""The ranks of one machine: what they get from the process that starts them, and what it tells of their end."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sennit.runtime.training.launch import RankFailure, run_ranks, serve_store

TIMEOUT_S = 30.0


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], list[Any]]:
    """`run(name, argument)`: the results of two ranks that run this function of launch_cases.py."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))

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
