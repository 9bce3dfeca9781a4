# SPDX-License-Identifier: Apache-2.0
"""What torch installs to test its own distributed packages runs over sennit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.runtime.conftest import World

pytestmark = pytest.mark.timeout(180)

Ranks = Callable[[int], World]
MODELS = "frameworks/torch_model_cases.py"
HOOKS = "frameworks/torch_hook_cases.py"
# Of torch's tests, in torch 2.13. Most of the others need a GPU.
LEAST_COLLECTIVES = 100
LEAST_DDP = 12


def run_backend_tests(ranks: Ranks, tmp_path: Path, of_ddp: bool) -> list[str]:
    """The names of torch's tests that ran on four ranks, as some of them need. The others were skipped by torch."""
    case = "frameworks/torch_cases.py"
    outcomes, *_ = ranks(4).run(case, "backend_tests", timeout_s=150.0, folder=str(tmp_path), of_ddp=of_ddp)
    print(*(f"{name}: {outcome}" for name, outcome in outcomes.items()), sep="\n")
    return [name for name, outcome in outcomes.items() if outcome == "ran"]


def test_collectives(ranks: Ranks, tmp_path: Path) -> None:
    assert len(run_backend_tests(ranks, tmp_path, of_ddp=False)) >= LEAST_COLLECTIVES


def test_ddp(ranks: Ranks, tmp_path: Path) -> None:
    assert len(run_backend_tests(ranks, tmp_path, of_ddp=True)) >= LEAST_DDP


def test_ddp_hooks(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(HOOKS, "hooks", folder=str(tmp_path))


def test_overlapped_zero(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(HOOKS, "overlapped_zero", folder=str(tmp_path))


def test_fsdp2(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(MODELS, "fsdp2", folder=str(tmp_path))


def test_dtensor(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(MODELS, "dtensor", folder=str(tmp_path))


def test_functional_collectives(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(MODELS, "tensor_parallel", folder=str(tmp_path))


def test_compile(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(MODELS, "compiled", folder=str(tmp_path))


def test_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(MODELS, "checkpoint", folder=str(tmp_path))
