# SPDX-License-Identifier: Apache-2.0
"""Models on sharded tables, trained over networks that lose packets: the digest of one rank alone."""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("pyroute2", reason="missing capability tc-bpf: pyroute2 is not installed")

from sennit.testbed.topology import Impairment, Planes
from tests.ranks import command

# `make test` has a training over lossy networks where ranks and feeders are, and one in the VM over soft-RoCE.
pytestmark = [
    pytest.mark.root,
    pytest.mark.long,
    pytest.mark.needs("backend", "tc-bpf", "nsenter"),
    pytest.mark.timeout(180),
]

DEADLINE_S = 90.0


def train_and_print(rank: int, world: int, folder: Path, placement: str, tables: str) -> None:
    """Prints the digest of the run.

    `tables`: "fixed"; "dynamic", whose rows are in files beside other ranks; or "histories", which a model attends to.
    """
    import torch.distributed as dist

    from tests.runtime import dynamic_training, sharded_model, trainer_runs

    dist.init_process_group("cpu:sennit", init_method=f"file://{folder / 'store'}", rank=rank, world_size=world)
    if tables == "fixed":
        print(sharded_model.trained(rank, world, placement), flush=True)
    elif tables == "histories":
        print(trainer_runs.train_on_histories(placement), flush=True)
    else:
        files = str(folder) if world > 1 else None
        digest, _, _ = dynamic_training.trained(
            rank, world, "second", "bags", 20, dynamic_training.TABLE, placement, files
        )
        print(digest, flush=True)
    dist.barrier()  # Nobody leaves while others still wait for its packets.
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The digest of one rank's run with these tables."""
    return functools.cache(lambda tables: alone_in(tmp_path_factory.mktemp(tables), tables))


def alone_in(folder: Path, tables: str) -> str:
    trains = command(partial(train_and_print, 0, 1, folder, "table_wise", tables))
    return subprocess.run(trains, check=True, capture_output=True, text=True, timeout=DEADLINE_S).stdout


@pytest.mark.parametrize(
    ("world", "loss_fraction", "placement", "tables"),
    [
        (2, 0.01, "row_wise", "fixed"),
        (3, 0.05, "column_wise", "fixed"),
        (4, 0.01, "grid", "fixed"),
        (3, 0.05, "grid", "dynamic"),
        (4, 0.05, "row_wise", "histories"),
    ],
)
def test_loss_changes_no_bit_of_a_model(
    tmp_path: Path,
    alone: Callable[[str], str],
    world: int,
    loss_fraction: float,
    placement: str,
    tables: str,
    seed: int,
) -> None:
    with Planes(hosts=world, planes=2) as planes, contextlib.ExitStack() as stack:
        planes.impair(Impairment(loss_fraction=loss_fraction, reorder_fraction=0.05, reorder_depth=16, seed=seed))
        ranks = []
        for rank in range(world):
            trains = command(partial(train_and_print, rank, world, tmp_path, placement, tables))
            environment = {**os.environ, **planes.environment(rank), "SENNIT_TIMEOUT_S": f"{DEADLINE_S}"}
            errors = stack.enter_context((tmp_path / f"rank{rank}").open("w"))
            process = planes.popen(rank, trains, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
            stack.callback(process.kill)
            ranks.append(process)
        for rank, process in enumerate(ranks):
            output, _ = process.communicate(timeout=DEADLINE_S)
            assert output == alone(tables), (tmp_path / f"rank{rank}").read_text()[-4000:]
        switches = [planes.counters(host, plane) for host in range(world) for plane in range(2)]
        assert sum(switch.dropped for switch in switches) > 0
