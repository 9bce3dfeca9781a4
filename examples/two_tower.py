# SPDX-License-Identifier: Apache-2.0
"""Two towers for retrieval: which films will a user like? Trained on MovieLens 100K with in-batch negatives.

    torchrun --standalone --nproc-per-node 2 examples/two_tower.py

One tower makes a vector of a user, the other one of a film. A film that the user liked shall have a larger product
than the other films of the batch (Yi et al., "Sampling-bias-corrected neural modeling", RecSys 2019).

Negatives that come from "the batch of a rank" are others with each number of ranks. Here they come from the sample's
slice: the global batch has 8 slices whatever the number of ranks. So loss, recall and all weights have the same bits.
"""

import argparse
import hashlib

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sennit.runtime.data import Preprocessing, Source, load
from sennit.runtime.replicas import SlicedReplicas
from sennit.runtime.sharded import Pooling, ShardedEmbeddingBags, Table

BATCH = 1024  # samples of all ranks together: 127 negatives for each, in slices of 128
DIM = 32
FOUND = 100
USER, FILM = ("user", "age", "gender", "occupation"), ("film", "genre")


class TwoTowers(nn.Module):
    """Vectors [B, 32] of users and of films."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.film = (
            nn.Sequential(nn.Linear(len(names) * DIM, 64), nn.ReLU(), nn.Linear(64, DIM)) for names in (USER, FILM)
        )

    def forward(self, vectors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        users, films = (torch.cat([vectors[name] for name in names], 1) for names in (USER, FILM))
        return self.user(users), self.film(films)


def in_batch_softmax(users: Tensor, films: Tensor, film_ids: Tensor, log_chance: Tensor) -> Tensor:
    """The mean loss of one slice [b]: sample i's film is right, those of the others are wrong."""
    # Films that many users liked are often in the slice: without the correction they would be pushed down.
    scores = users @ films.T - log_chance
    same = film_ids.unsqueeze(1) == film_ids
    same.fill_diagonal_(False)
    return nn.functional.cross_entropy(scores.masked_fill(same, -torch.inf), torch.arange(len(users)))


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--steps", type=int, default=40)
    steps = options.parse_args().steps

    dist.init_process_group("sennit")
    torch.set_num_threads(1)  # matrix products may round differently with another number of threads
    rank = dist.get_rank()

    # A small data set, of which pairs are drawn at random, with their films: every rank has all of it in memory.
    raw = load(Source(data="movielens"), seed=0)
    is_training = torch.rand(len(raw), generator=torch.Generator().manual_seed(0)) >= 0.05
    samples = Preprocessing.fit(raw, is_training).apply(raw).samples()
    liked = samples.labels == 1
    train, held_out = (liked & is_training).nonzero()[:, 0], (liked & ~is_training).nonzero()[:, 0]
    film_of = {column.name: column.values for column in samples.columns}["film"].long()
    log_chance = (torch.bincount(film_of[train], minlength=int(film_of.max()) + 1) / len(train)).clamp(min=1e-6).log()

    tables = [
        # A film has several genres, or none: the vector of a bag is the mean of its rows.
        Table(name=column.name, rows=column.row_count, dim=DIM, row_shards=2, pooling=Pooling.MEAN)
        for column in samples.columns
    ]
    embeddings = ShardedEmbeddingBags(tables, lr=0.1, placement="row_wise")
    torch.manual_seed(0)
    replicas = SlicedReplicas(TwoTowers())
    optimizer = torch.optim.Adam(replicas.parameters(), lr=0.002)

    def own(rows: Tensor) -> Tensor:
        """Those in this rank's slices. Sizes of slices differ by one if `rows` are no multiple of 8."""
        return rows[replicas.slices.own_samples(len(rows))]

    def towers(rows: Tensor) -> tuple[Tensor, Tensor]:
        """Vectors of the own part of `rows`. All ranks call it: ids and rows travel between them."""
        vectors = embeddings(samples.batch(own(rows)), global_batch=len(rows))
        users, films = replicas(vectors, global_batch=len(rows))
        return users, films

    for step in range(steps):
        rows = train[torch.randint(len(train), (BATCH,), generator=torch.Generator().manual_seed(step))]
        users, films = towers(rows)
        film_ids = film_of[own(rows)]
        losses = replicas.each_slice(in_batch_softmax, users, films, film_ids, log_chance[film_ids])
        optimizer.zero_grad()
        replicas.loss(losses).backward()  # updates the rows, and sums the other gradients over all slices
        optimizer.step()
        loss = replicas.global_loss(losses)
        if rank == 0 and step % 10 == 9:
            print(f"step {step + 1}: loss {loss:.6f}")

    with torch.no_grad():
        known = torch.stack([(film_of == film).nonzero()[0, 0] for film in film_of.unique()])  # a sample of each film
        films = replicas.gathered(towers(known)[1], len(known))  # of all ranks, in the order of samples
        users = replicas.gathered(towers(held_out)[0], len(held_out))
    found = film_of[known][(users @ films.T).topk(FOUND).indices]
    recall = (found == film_of[held_out].unsqueeze(1)).any(1).float().mean()
    weights = hashlib.sha256(f"{embeddings.digest()} {replicas.digest()}".encode()).hexdigest()
    if rank == 0:
        print(f"recall@{FOUND} {recall:.4f} of {len(held_out)} held-out films, weights {weights}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
