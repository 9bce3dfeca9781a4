# SPDX-License-Identifier: Apache-2.0
"""Programs that no index of packages has. They run over sennit from clones that environment variables name."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from sennit.runtime.data.seeds import numpy_stream

pytestmark = pytest.mark.timeout(600)

RESEARCH_TRAINER = "generative_recommenders/research/trainer/train.py"

# The program stays as it is. Only its list of names of backends has one more.
PARAM = """
from param_bench.train.comms.pt import comms, pytorch_backend_utils

pytorch_backend_utils.supportedC10dBackends.append("sennit")
comms.main()
"""

# The trainer of the research models is for GPUs over nccl. Three of its phrases are others, and it has fewer steps.
RESEARCH = """
import importlib.util, logging, os, sys, types

import fbgemm_gpu
import gin
import torch

torch.manual_seed(0)
torch.set_num_threads(1)
logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s", force=True)
path = importlib.util.find_spec("generative_recommenders.research.trainer.train").origin
with open(path) as file:
    text = file.read()
for old, new in (
    ('"nccl"', repr(sys.argv[1])), ("device = rank", 'device = "cpu"'), ("device_ids=[rank]", "device_ids=None")
):
    assert text.count(old) == 1, old
    text = text.replace(old, new)
train = types.ModuleType("trainer")
exec(compile(text, path, "exec"), train.__dict__)
gin.parse_config(["create_data_loader.num_workers = 1", "create_data_loader.prefetch_factor = 2"])
train.train_fn(
    int(os.environ["RANK"]), 2, int(os.environ["MASTER_PORT"]), dataset_name="ml-1m", main_module=sys.argv[2],
    max_sequence_length=20, local_batch_size=8, eval_batch_size=8, num_epochs=2, item_embedding_dim=16,
    interaction_module_type="DotProduct", sampling_strategy=sys.argv[3], num_negatives=8, item_l2_norm=True,
    gr_output_length=2, eval_interval=1, top_k_method="MIPSBruteForceTopK",
)
"""

# The examples are for GPUs. A phrase and what takes its place follow each other in the arguments.
EXAMPLE = """
import os, sys

import torch
import torch.distributed as dist

torch.manual_seed(0)
torch.set_num_threads(1)
path, *phrases = sys.argv[1:]
sys.argv = [path, "2", "1"]
sys.path.insert(0, os.path.dirname(path))
with open(path) as file:
    text = file.read()
for old, new in zip(phrases[::2], phrases[1::2], strict=True):
    assert old in text, old
    text = text.replace(old, new)
space = {"__name__": "__main__"}
exec(compile(text, path, "exec"), space)
if os.environ["RANK"] == "0":
    model = space.get("tp_model")
    weights = model.state_dict() if model is not None else torch.load("snapshot.pt")["MODEL_STATE"]
    for name, one in weights.items():
        print("weights", name, (one.to_local() if model is not None else one).tolist())
"""

# Two of pytorch/examples, the lines of weights that they end with, and the phrases.
TUTORIAL = "distributed/ddp-tutorial-series/multigpu_torchrun.py"
TENSOR_PARALLEL = "distributed/tensor_parallelism/tensor_parallel_example.py"
EXAMPLES = {
    TUTORIAL: (2, {
        'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))': "",
        '"nccl"': "BACKEND",
        ".to(self.gpu_id)": "",
        "[self.gpu_id]": "None",
        "pin_memory=True": "pin_memory=False",
    }),
    TENSOR_PARALLEL: (4, {
        "torch.accelerator.current_accelerator().type": "'cpu'",
        "device_mesh = init_device_mesh": "dist.init_process_group(BACKEND)\ndevice_mesh = init_device_mesh",
        "verify_min_gpu_count(min_gpus=_min_gpu_count)": "True",
    }),
}  # fmt: skip


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


def run(command: list[str], folder: Path, port: int, **further: str) -> str:
    """Runs a program in `folder` as two ranks. Returns what rank 0 printed. `further`: variables."""
    shared = {
        **os.environ,
        **further,
        "WORLD_SIZE": "2",
        "LOCAL_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    ranks: list[subprocess.Popen[str]] = []
    try:
        for rank in range(2):
            variables = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            pipe, same = subprocess.PIPE, subprocess.STDOUT
            ranks.append(subprocess.Popen(command, cwd=folder, env=variables, text=True, stdout=pipe, stderr=same))
        printed = [rank.communicate(timeout=240)[0] for rank in ranks]
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


def write_movielens(folder: Path, users: int = 48, items: int = 3_000) -> None:
    """The files that the research trainer reads of ml-1m: users who go on from a film to one near it."""
    stream = numpy_stream(1, "research")
    rows = ["index,user_id,sequence_item_ids,sequence_ratings,sequence_timestamps"]
    for user in range(users):
        length = int(stream.integers(4, 30))
        films = (stream.integers(items) + np.cumsum(stream.integers(1, 4, length))) % items + 1
        times = 978_300_000 + np.cumsum(stream.integers(0, 90_000, length))
        columns = (films, stream.integers(1, 6, length), times)
        rows.append(",".join([f"{user},{user + 1}", *(f'"{",".join(map(str, one))}"' for one in columns)]))
    (folder / "tmp" / "ml-1m").mkdir(parents=True)
    (folder / "tmp" / "ml-1m" / "sasrec_format.csv").write_text("\n".join(rows) + "\n")
    described = "".join(f"{film},Drama|Comedy,A film,{1960 + film % 40}\n" for film in range(1, items + 1))
    (folder / "tmp" / "processed" / "ml-1m").mkdir(parents=True)
    (folder / "tmp" / "processed" / "ml-1m" / "movies.csv").write_text(
        "movie_id,genres,cleaned_title,year\n" + described
    )


@pytest.mark.parametrize(("module", "sampling"), [("HSTU", "local"), ("SASRec", "in-batch")])
def test_generative_recommenders(module: str, sampling: str, port: int, tmp_path: Path) -> None:
    """meta-recsys/generative-recommenders: its research trainer, with DDP, evaluations and its metrics of all ranks."""
    folder = clone("GENERATIVE_RECOMMENDERS_CLONE", RESEARCH_TRAINER, "fbgemm_gpu", "gin", "tensorboard")
    write_movielens(tmp_path)
    told = {}
    for place, backend in enumerate(("sennit", "gloo")):
        command = [sys.executable, "-c", RESEARCH, backend, module, sampling]
        printed = run(command, tmp_path, port + place, PYTHONPATH=os.pathsep.join([str(folder), *sys.path]))
        # Without the seconds that an epoch took.
        told[backend] = re.findall(r"(?:: (\d+\.\d{6})$|(NDCG@10 .*))", printed, re.MULTILINE)
    assert len(told["sennit"]) == 14, told
    assert told["sennit"] == told["gloo"]


@pytest.mark.parametrize("program", EXAMPLES)
def test_examples(program: str, port: int, tmp_path: Path) -> None:
    """pytorch/examples: the tutorial of DDP that saves snapshots, and tensor parallelism."""
    folder = clone("EXAMPLES_CLONE", program)
    lines, phrases = EXAMPLES[program]
    weights = {}
    for place, backend in enumerate(("sennit", "gloo")):
        (tmp_path / backend).mkdir()
        command = [sys.executable, "-c", EXAMPLE, str(folder / program)]
        for old, new in phrases.items():
            command += [old, new.replace("BACKEND", repr(backend))]
        printed = run(command, tmp_path / backend, port + place)
        weights[backend] = re.findall(r"^weights .*$", printed, re.MULTILINE)
    assert len(weights["sennit"]) == lines
    assert weights["sennit"] == weights["gloo"]
