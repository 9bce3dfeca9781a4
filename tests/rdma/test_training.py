# SPDX-License-Identifier: Apache-2.0
"""A DLRM that is trained over RDMA devices has the same weights, bit for bit, as one trained in shared memory."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

# To import torch takes tens of seconds in the VM.
pytestmark = [pytest.mark.rdma, pytest.mark.long, pytest.mark.timeout(600)]

TRAINER = Path(__file__).with_name("trainer.py")


def test_weights_do_not_depend_on_the_transport_nor_on_loss(netem: Callable[[int, str], None], tmp_path: Path) -> None:
    for package in ("torch", "pandas", "pyarrow"):
        # Found without an import, which would take seconds and much memory here.
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed (make build)")
    log = tmp_path / "log"
    with (
        log.open("wb") as errors,
        subprocess.Popen(
            [sys.executable, str(TRAINER)],
            env={**os.environ, "OMP_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as trainer,
    ):
        assert trainer.stdin is not None
        assert trainer.stdout is not None
        try:
            digests = []
            for transport in ("shm", "verbs"):
                if transport == "verbs":
                    for device in (0, 1):
                        netem(device, "loss 1%")
                trainer.stdin.write(f"{transport}\n")
                trainer.stdin.flush()
                digests.append(trainer.stdout.readline().strip())
            trainer.stdin.close()
        except BaseException:
            print(log.read_text())
            trainer.kill()
            raise
    assert trainer.returncode == 0, log.read_text()
    assert len(digests[0]) == 64
    assert digests[1] == digests[0]
