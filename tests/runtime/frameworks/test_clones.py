# SPDX-License-Identifier: Apache-2.0
"""Programs that no index of packages has. They run over sennit from clones that environment variables name."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(300)

# The program stays as it is. Only its list of names of backends has one more.
PARAM = """
from param_bench.train.comms.pt import comms, pytorch_backend_utils

pytorch_backend_utils.supportedC10dBackends.append("sennit")
comms.main()
"""


def clone(variable: str, program: str, *packages: str) -> Path:
    """The folder that `variable` names. Skips if there is none."""
    folder = Path(os.environ.get(variable, ""))
    if not folder.parts:
        pytest.skip(f"{variable} names no clone")
    assert (folder / program).exists(), f"{variable} names {folder}, which has no {program}"
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"the package {package} is not installed")
    return folder.resolve()


def run(command: list[str], folder: Path, port: int) -> str:
    """Runs a program in `folder` as two ranks. Returns what rank 0 printed."""
    shared = {**os.environ, "WORLD_SIZE": "2", "LOCAL_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks: list[subprocess.Popen[str]] = []
    try:
        for rank in range(2):
            variables = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            pipe, same = subprocess.PIPE, subprocess.STDOUT
            ranks.append(subprocess.Popen(command, cwd=folder, env=variables, text=True, stdout=pipe, stderr=same))
        printed = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert [process.returncode for process in ranks] == [0, 0], "\n".join(printed)
    return printed[0]


def test_dlrm(port: int, tmp_path: Path) -> None:
    """facebookresearch/dlrm: `all_to_all_single(t, t)`, an AlltoAll of embeddings each way, DDP."""
    program = clone("DLRM_CLONE", "dlrm_s_pytorch.py", "sklearn", "tqdm") / "dlrm_s_pytorch.py"
    model = ["--arch-embedding-size=80-70-60", "--arch-sparse-feature-size=4", "--arch-mlp-bot=8-8-4"]
    model += ["--arch-mlp-top=10-6-1", "--num-indices-per-lookup=3", "--data-generation=random"]
    losses = {}
    for place, backend in enumerate(("sennit", "gloo")):
        batches = ["--mini-batch-size=32", "--num-batches=20", "--print-freq=1", f"--dist-backend={backend}"]
        printed = run([sys.executable, str(program), *model, *batches], tmp_path, port + place)
        assert f"Running on 2 ranks using {backend} backend" in printed
        assert "fail to enable" not in printed
        losses[backend] = re.findall(r"loss (\S+)", printed)
    assert len(losses["sennit"]) == 20
    assert losses["sennit"] == losses["gloo"]


def test_param(port: int, tmp_path: Path) -> None:
    """facebookresearch/param: its benchmark checks what each collective brings."""
    (tmp_path / "param_bench").symlink_to(clone("PARAM_CLONE", "train/comms/pt/comms.py"))
    collectives = (
        "reduce", "all_reduce", "all_to_all", "all_to_allv", "all_gather", "broadcast", "reduce_scatter",
        "reduce_scatter_base", "all_gather_base", "gather", "scatter",
    )  # fmt: skip
    options = {"backend": "sennit", "device": "cpu", "master-ip": "127.0.0.1", "master-port": port, "c": 1}
    options |= {"b": 8, "e": "64K", "f": 16, "n": 3, "w": 1, "collective": ",".join(collectives)}
    command = [sys.executable, "-c", PARAM]
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    # Python imports from the folder in which it is started.
    printed = run(command, tmp_path, port)
    sizes = {name: len(re.findall(rf"COMMS-RES-{name}-float32 ", printed)) for name in collectives}
    assert set(sizes.values()) == {4}, f"{sizes}\n{printed}"
