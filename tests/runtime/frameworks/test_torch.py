# SPDX-License-Identifier: Apache-2.0
# Torch types its collectives thinly:
# mypy: disable-error-code="no-untyped-call"
"""What torch installs to test its own distributed packages runs over sennit."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import unittest
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from tests.runtime.frameworks.over_sennit import as_under_torchrun, group_over_sennit
from tests.runtime.frameworks.torch_models import checkpoint, compiled, dtensor, fsdp2, tensor_parallel
from tests.runtime.world import World

pytestmark = pytest.mark.timeout(180)
# Of the tests that torch does not skip itself: some need what this machine has not, and use a GPU before they ask for
# it; those of monitored_barrier expect the texts of gloo's errors; the tests of deadlines leave a group that failed.
NEEDS = "cuda|test_SyncBatchNorm_process_group|test_batch_isend_irecv_(mixed_backend|op)_err"
OF_GLOO = "test_get_backend|monitored_barrier"
LEFT_OUT = f"{NEEDS}|{OF_GLOO}|test_barrier_timeout"


@contextlib.contextmanager
def surroundings(rank: int, world: int, folder: str) -> Iterator[Any]:
    """The class of torch's tests of a backend, which take the branches of gloo on CPUs."""
    for name in ("barrier", "init_dir", "test_dir"):
        (Path(folder) / name).mkdir(exist_ok=True)
    variables = {**as_under_torchrun(rank, world, 0), "BACKEND": "gloo", "TEMP_DIR": folder}
    with mock.patch.dict(os.environ, variables), mock.patch.object(sys, "argv", ["tests"]):
        import torch.testing._internal.distributed.distributed_test as upstream

        class Tests(upstream.DistributedTest._DistTestBase, upstream.TestDistBackend):
            pass

        # torch runs its tests of groups inside a world of less than 8 ranks for MPI only.
        os.environ["BACKEND"] = "mpi"
        yield Tests


def run_one(tests: Any, name: str, rank: int) -> str:
    """Returns "ran", or why torch skips the test here."""
    from torch.testing._internal.common_utils import set_rng_seed

    case = tests(name)
    case.rank = rank
    set_rng_seed(1234)
    try:
        getattr(case, name)()
    except unittest.SkipTest as skipped:
        return f"skipped: {skipped}"
    except SystemExit as skipped:  # torch tells the process that started the ranks by their exit code.
        return f"skipped: exit code {skipped.code}"
    return "ran"


def is_of_ddp(name: str) -> bool:
    return re.search("ddp|distributeddataparallel|_grad|static_graph", name, re.IGNORECASE) is not None


def backend_tests(rank: int, world: int, folder: str, of_ddp: bool) -> dict[str, str]:
    """Runs torch's tests of DDP, or all others, and returns what became of each."""
    outcomes = {}
    with group_over_sennit(rank, world, folder, "backend_tests"), surroundings(rank, world, folder) as tests:
        for name in sorted(dir(tests)):
            if name.startswith("test_") and is_of_ddp(name) == of_ddp and not re.search(LEFT_OUT, name):
                try:
                    outcomes[name] = run_one(tests, name, rank)
                    dist.barrier()
                except BaseException as error:
                    raise AssertionError(f"torch's {name} failed") from error
    return outcomes


Ranks = Callable[[int], World]
# Of torch's tests, in torch 2.13. Most of the others need a GPU.
LEAST_COLLECTIVES = 100
LEAST_DDP = 12


def run_backend_tests(ranks: Ranks, tmp_path: Path, of_ddp: bool) -> list[str]:
    """The names of torch's tests that ran on four ranks, as some of them need. The others were skipped by torch."""
    outcomes, *_ = ranks(4).run_within(150.0, backend_tests, folder=str(tmp_path), of_ddp=of_ddp)
    print(*(f"{name}: {outcome}" for name, outcome in outcomes.items()), sep="\n")
    return [name for name, outcome in outcomes.items() if outcome == "ran"]


@pytest.mark.long
def test_collectives(ranks: Ranks, tmp_path: Path) -> None:
    assert len(run_backend_tests(ranks, tmp_path, of_ddp=False)) >= LEAST_COLLECTIVES


def test_ddp(ranks: Ranks, tmp_path: Path) -> None:
    assert len(run_backend_tests(ranks, tmp_path, of_ddp=True)) >= LEAST_DDP


def test_ddp_hooks(ranks: Ranks, tmp_path: Path) -> None:
    from tests.runtime.frameworks.torch_hooks import hooks  # slow, and not for ranks of other tests

    ranks(2).run(hooks, folder=str(tmp_path))


def test_overlapped_zero(ranks: Ranks, tmp_path: Path) -> None:
    from tests.runtime.frameworks.torch_hooks import overlapped_zero

    ranks(2).run(overlapped_zero, folder=str(tmp_path))


def test_fsdp2(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(fsdp2, folder=str(tmp_path))


def test_dtensor(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(dtensor, folder=str(tmp_path))


def test_functional_collectives(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(tensor_parallel, folder=str(tmp_path))


@pytest.mark.long
def test_compile(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(compiled, folder=str(tmp_path))


def test_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(checkpoint, folder=str(tmp_path))
