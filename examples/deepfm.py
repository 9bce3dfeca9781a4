# SPDX-License-Identifier: Apache-2.0
"""DeepFM (Guo et al., IJCAI 2017): every table placed in its own way, the dense part in bfloat16, the same bits.

    torchrun --standalone --nproc-per-node 3 examples/deepfm.py --placement mixed

A factorisation machine needs two things of each id: a weight and a vector. Here both are one row: column 0 is the
weight. Whatever the number of ranks and the placement, the output is the same, with the digest of all weights.
`dcnv2.py` explains the parts that both have.
"""

import argparse
import hashlib

import torch
import torch.distributed as dist
from torch import Generator, Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from sennit.runtime.replicas import SlicedReplicas
from sennit.runtime.sharded import ShardedEmbeddingBags, Table
from sennit.runtime.stream import StreamLoader

BATCH = 512  # samples of all ranks together
DIM = 16
# Large tables over all ranks, small ones on every rank, the others on one rank each.
MIXED = {"tailnum": "row_wise", "flight": "column_wise", "origin": "data_parallel", "carrier": "data_parallel"}


class DeepFM(nn.Module):
    """The sum of a linear part, of products of all pairs of fields, and of a multi-layer perceptron."""

    def __init__(self, dense: int, tables: int) -> None:
        super().__init__()
        fields = dense + tables
        # A dense feature is a field whose weight and vector are multiplied by its value.
        self.dense_rows = nn.Parameter(torch.randn(dense, 1 + DIM) * 0.05)
        self.bias = nn.Parameter(torch.zeros(()))
        self.deep = nn.Sequential(
            nn.Linear(fields * DIM, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 1)
        )

    def forward(self, dense: Tensor, rows: dict[str, Tensor]) -> Tensor:
        fields = torch.cat([dense.unsqueeze(2) * self.dense_rows, torch.stack(list(rows.values()), 1)], 1)
        linear, vectors = fields[:, :, 0].sum(1), fields[:, :, 1:]
        # Rendle 2010: the square of the sum holds each pair twice, and each field with itself.
        pairs = 0.5 * (vectors.sum(1).square() - vectors.square().sum(1)).sum(1)
        deep: Tensor = self.deep(vectors.flatten(1)).squeeze(1)
        return self.bias + linear + pairs + deep


def small(rows: Tensor, generator: Generator) -> None:
    """Initial rows. The generator depends on seed, table and row alone, so rows do not depend on who makes them."""
    rows.normal_(0, 0.05, generator=generator)


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--samples", type=int, default=8_192, help="to train on, at most 294,000")
    options.add_argument("--placement", default="mixed", help="mixed, table_wise, row_wise, column_wise, data_parallel")
    given = options.parse_args()

    dist.init_process_group("sennit")
    torch.set_num_threads(1)
    rank = dist.get_rank()
    loader = StreamLoader("flights", batch_size=BATCH, max_steps=given.samples // BATCH, seed=0)

    # Shards are virtual: a rank may have many, and tables that stay whole on a rank may have them too.
    tables = [
        Table(name=table.name, rows=table.rows, dim=1 + DIM, initial=small, row_shards=2, column_shards=2)
        for table in loader.tables
    ]
    placement = given.placement
    if placement == "mixed":
        placement = {table.name: MIXED.get(table.name, "table_wise") for table in tables}
    embeddings = ShardedEmbeddingBags(tables, lr=0.05, placement=placement)
    torch.manual_seed(0)
    # Random numbers of dropout depend on (seed, step, slice), not on the rank that draws them.
    replicas = SlicedReplicas(DeepFM(loader.dense_count, len(tables)), seed=1)
    optimizer = torch.optim.AdamW(replicas.parameters(), lr=0.002)

    for step, batch in enumerate(loader):
        vectors = embeddings(batch)
        with torch.autocast("cpu", torch.bfloat16):
            logits = replicas(batch.dense, vectors)
        losses = replicas.each_slice(binary_cross_entropy_with_logits, logits.float(), batch.labels)
        optimizer.zero_grad()
        replicas.loss(losses).backward()
        nn.utils.clip_grad_norm_(replicas.parameters(), 1.0)  # of global sums, so all ranks clip alike
        optimizer.step()
        loss = replicas.global_loss(losses)
        if rank == 0 and step % 4 == 3:
            print(f"step {step + 1}: loss {loss:.6f}")

    weights = hashlib.sha256(f"{embeddings.digest()} {replicas.digest()}".encode()).hexdigest()
    if rank == 0:
        print(f"weights {weights}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
