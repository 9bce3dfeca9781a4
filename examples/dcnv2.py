# SPDX-License-Identifier: Apache-2.0
"""DCNv2 on sharded embedding tables: will a flight be late? The output is the same with 1, 2, 3 and 4 ranks.

    torchrun --standalone --nproc-per-node 2 examples/dcnv2.py

The model is an ordinary torch module (Wang et al., "DCN V2", WWW 2021, the parallel structure).
`ShardedEmbeddingBags` has the tables: each rank has a part of them, and the backward pass updates the rows.
`SlicedReplicas` has the rest, in place of DistributedDataParallel.

Both cut the global batch into 8 slices and sum slice by slice, in an order that does not depend on the ranks. So the
digest of all weights, in the last line, has the same bits however many ranks there are.
"""

import argparse
import hashlib
import itertools

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.optim.lr_scheduler import LambdaLR

from sennit.runtime.data import Batch
from sennit.runtime.replicas import SlicedReplicas
from sennit.runtime.sharded import Optimizer, OptimizerSpec, ShardedEmbeddingBags, Table
from sennit.runtime.stream import StreamLoader

BATCH = 512  # samples of all ranks together, however many there are
WARM_UP = 8  # steps
ADAM = OptimizerSpec(kind=Optimizer.ADAM)


class DCNv2(nn.Module):
    """Cross layers beside a multi-layer perceptron. Both see all features of a sample in one vector."""

    def __init__(self, width: int, cross_layers: int = 3) -> None:
        super().__init__()
        self.cross = nn.ModuleList(nn.Linear(width, width) for _ in range(cross_layers))
        self.deep = nn.Sequential(nn.Linear(width, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU())
        self.head = nn.Linear(width + 64, 1)

    def forward(self, dense: Tensor, vectors: dict[str, Tensor]) -> Tensor:
        first = torch.cat([dense, *vectors.values()], 1)
        crossed = first
        for layer in self.cross:
            crossed = first * layer(crossed) + crossed
        logits: Tensor = self.head(torch.cat([crossed, self.deep(first)], 1))
        return logits.squeeze(1)


def auc(scores: Tensor, labels: Tensor) -> float:
    """The chance that a late flight has a higher score than a punctual one (Mann and Whitney 1947)."""
    late = labels[scores.argsort(stable=True)] == 1
    ranks = torch.arange(1, len(late) + 1)[late].sum().item()
    count = int(late.sum())
    return (ranks - count * (count + 1) / 2) / (count * (len(late) - count))


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--samples", type=int, default=16_384, help="to train on, at most 294,000")
    steps = options.parse_args().samples // BATCH
    dist.init_process_group("sennit")
    torch.set_num_threads(1)  # matrix products may round differently with another number of threads
    rank = dist.get_rank()

    # Each rank gets its own part of each batch, in an order that does not depend on the ranks. A tenth is held back.
    loader = StreamLoader("flights", batch_size=BATCH, max_steps=steps, seed=0)

    # Row shards belong to the model, as the width does. With 8 of them a table can lie on up to 8 ranks.
    tables = [Table(name=table.name, rows=table.rows, dim=16, row_shards=8, optimizer=ADAM) for table in loader.tables]
    # `placement` says who has which shard. It decides time and memory, and no bit: try "table_wise" or "data_parallel".
    embeddings = ShardedEmbeddingBags(tables, lr=0.003, placement="row_wise")
    torch.manual_seed(0)
    replicas = SlicedReplicas(DCNv2(loader.dense_count + sum(table.dim for table in tables)))

    # Tables have optimizers of their own. `embeddings.optimizer` holds their learning rates, for any scheduler.
    optimizers = [torch.optim.Adam(replicas.parameters(), lr=0.003), embeddings.optimizer]
    schedulers = [LambdaLR(optimizer, lambda step: min(1, (step + 1) / WARM_UP)) for optimizer in optimizers]

    def logits_of(batch: Batch) -> Tensor:
        """Logits of this rank's slices. All ranks call it: ids and rows travel between them."""
        vectors = embeddings(batch, global_batch=BATCH)
        logits: Tensor = replicas(batch.dense, vectors, global_batch=BATCH)
        return logits

    for step, batch in enumerate(loader):
        logits, labels = logits_of(batch), batch.labels
        # A loss over all samples of a rank would have other bits in another world, so each slice has its own.
        losses = replicas.each_slice(binary_cross_entropy_with_logits, logits, labels)
        optimizers[0].zero_grad()
        replicas.loss(losses).backward()  # updates the rows, and sums the other gradients over all slices
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            scheduler.step()
        loss = replicas.global_loss(losses)  # collective, so not inside the condition
        if rank == 0 and step % 8 == 7:
            print(f"step {step + 1}: loss {loss:.6f}")

    replicas.eval()
    with torch.no_grad():
        pairs = [
            [replicas.gathered(part, BATCH) for part in (logits_of(batch), batch.labels)]  # of all ranks
            for batch in itertools.islice(loader.evaluation(), 16)
        ]
    scores, labels = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    weights = hashlib.sha256(f"{embeddings.digest()} {replicas.digest()}".encode()).hexdigest()
    if rank == 0:
        print(f"AUC {auc(scores, labels):.4f} on {len(labels)} held-out flights, weights {weights}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
