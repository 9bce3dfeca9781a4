# SPDX-License-Identifier: Apache-2.0
"""Which film does a user rate next? Attention over the user's history, and cross-entropy with sampled negatives.

    torchrun --standalone --nproc-per-node 2 examples/retrieval_sequences.py

A history has as many events as it has: nothing is padded. `ShardedEmbeddings` gives the row of each film in it as a
nested tensor, `SlicedReplicas` cuts that between sequences, and `jagged_attention` attends within each one. The output,
with the digest of all weights in the last line, is the same with any number of ranks.
"""

import argparse
import hashlib
import itertools

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from sennit.runtime.data import Batch
from sennit.runtime.kernels import jagged_attention
from sennit.runtime.replicas import SlicedReplicas
from sennit.runtime.sharded import Optimizer, OptimizerSpec, ShardedEmbeddings, Table
from sennit.runtime.stream import StreamLoader

BATCH, DIM, HEADS, NEGATIVES = 256, 32, 2, 64
ADAM = OptimizerSpec(kind=Optimizer.ADAM)


class Encoder(nn.Module):
    """A history -> what its user looks for: a layer of causal attention (SASRec, Kang and McAuley 2018, pre-norm)."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.randn(DIM) * 0.1)  # the query of users without a history
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(3))
        self.split, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.deep = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))
        self.distance = nn.Parameter(torch.zeros(HEADS, 64))

    def forward(self, rows: Tensor, lengths: Tensor) -> Tensor:
        """rows: nested [B, *, DIM] of history, own film, negatives; lengths: of histories -> [B, 1 + NEGATIVES]."""
        found, ends = rows.values(), rows.offsets()[1:]  # type: ignore[attr-defined]
        candidates = torch.arange(-1 - NEGATIVES, 0) + ends.unsqueeze(1)
        is_history = torch.ones(len(found), dtype=torch.bool)
        is_history[candidates] = False
        offsets = nn.functional.pad((lengths + 1).cumsum(0), (1, 0))
        # Each sequence begins with the row of `start`.
        x = self.start.expand(int(offsets[-1]), DIM).clone()
        is_event = torch.ones(len(x), dtype=torch.bool)
        is_event[offsets[:-1]] = False
        x = x.index_put((is_event.nonzero().squeeze(1),), found[is_history])
        query, key, value = self.split(self.norms[0](x)).view(len(x), 3, HEADS, -1).unbind(1)
        attended = jagged_attention(query, key, value, offsets, position_bias=self.distance)
        x = x + self.out(attended.reshape(len(x), DIM))
        x = self.norms[2](x + self.deep(self.norms[1](x)))
        logits: Tensor = torch.einsum("bd,bnd->bn", x[offsets[1:] - 1], found[candidates]) / DIM**0.5
        return logits


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--steps", type=int, default=300)
    steps = options.parse_args().steps
    dist.init_process_group("sennit")
    torch.set_num_threads(1)  # matrix products may round differently with another number of threads
    rank = dist.get_rank()

    # In the order of time: histories of later samples have what earlier ones were about.
    loader = StreamLoader("movielens", order="time", batch_size=BATCH, max_steps=steps, histories=True)
    film = [table.name for table in loader.tables].index("film")
    films = loader.tables[film].rows
    embeddings = ShardedEmbeddings(
        [Table(name="film", rows=films, dim=DIM, row_shards=8, pooling="none", optimizer=ADAM)],
        lr=0.003, placement="row_wise", outputs="nested",
    )  # fmt: skip
    torch.manual_seed(0)
    replicas = SlicedReplicas(Encoder())
    optimizer = torch.optim.Adam(replicas.parameters(), lr=0.003)

    def logits_of(batch: Batch, step: int) -> Tensor:
        """Logits of this rank's slices. All ranks call it."""
        parts = torch.split(batch.values, batch.lengths.sum(1).tolist())
        own = torch.split(parts[film], batch.lengths[film].tolist())
        # All ranks draw the negatives of all samples, and take those of their own.
        drawn = torch.randint(films, (BATCH, NEGATIVES), generator=torch.Generator().manual_seed(step))
        drawn = drawn[replicas.slices.own_samples(BATCH)]
        ids = torch.cat([torch.cat(pair) for pair in zip(own, drawn, strict=True)])
        ends = (batch.lengths[film].long() + NEGATIVES).cumsum(0)
        rows = embeddings({"film": (ids, nn.functional.pad(ends[:-1], (1, 0)))}, global_batch=BATCH)["film"]
        logits: Tensor = replicas(rows, batch.lengths[film].long() - 1, global_batch=BATCH)
        return logits

    for step, batch in enumerate(loader):
        logits = logits_of(batch, step)
        wanted = torch.zeros(len(logits), dtype=torch.int64)  # its own film is the first candidate
        losses = replicas.each_slice(cross_entropy, logits, wanted)
        optimizer.zero_grad()
        replicas.loss(losses).backward()  # updates the rows, and sums the other gradients over all slices
        optimizer.step()
        loss = replicas.global_loss(losses)  # collective, so not inside the condition
        if rank == 0 and step % max(1, steps // 10) == 0:
            print(f"step {step + 1}: loss {loss:.6f}")

    replicas.eval()
    with torch.no_grad():
        batches = itertools.islice(loader.evaluation(), 8)
        places = [
            replicas.gathered((logits[:, 1:] >= logits[:, :1]).sum(1), BATCH)  # of all ranks
            for logits in (logits_of(batch, steps + number) for number, batch in enumerate(batches))
        ]
    hits = (torch.cat(places) < 10).float().mean()
    weights = hashlib.sha256(f"{embeddings.digest()} {replicas.digest()}".encode()).hexdigest()
    if rank == 0:
        print(f"among the first 10 of {1 + NEGATIVES}: {hits:.4f}, weights {weights}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
