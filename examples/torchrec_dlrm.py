# SPDX-License-Identifier: Apache-2.0
"""TorchRec's DLRM, whose EmbeddingBagCollection is replaced by sharded tables with the same bits for all ranks.

    pip install --no-deps torchrec==1.9.0 fbgemm-gpu-cpu==1.8.0  # and what they import, except torch
    torchrun --standalone --nproc-per-node 2 examples/torchrec_dlrm.py

What stays: TorchRec's table configurations, its KeyedJaggedTensor and KeyedTensor, its dense, interaction and over
architectures. What goes: planner and DistributedModelParallel. Ids travel once for all slices of a rank, so the tables
are called before the rest, which runs slice by slice. `from_torchrec/after.py` needs fewer changes, beside DDP.
"""

import argparse
import hashlib

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from sennit.runtime.replicas import SlicedReplicas
from sennit.runtime.sharded import from_torchrec

BATCH = 512  # samples of all ranks together
DIM = 16
DENSE = 13
# Tables as a TorchRec program has them. One table serves two features.
CONFIGS = [
    EmbeddingBagConfig(name="user", num_embeddings=20_000, embedding_dim=DIM, feature_names=["user"]),
    EmbeddingBagConfig(name="item", num_embeddings=5_000, embedding_dim=DIM, feature_names=["bought", "seen"]),
    EmbeddingBagConfig(
        name="word", num_embeddings=800, embedding_dim=DIM, feature_names=["query"], pooling=PoolingType.MEAN
    ),
]


class PooledVectors(nn.Module):
    """In the place of an EmbeddingBagCollection: hands on vectors that were looked up before."""

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        return CONFIGS

    def forward(self, vectors: dict[str, Tensor]) -> KeyedTensor:
        return KeyedTensor.from_tensor_list(list(vectors), list(vectors.values()))


def global_batch(step: int) -> tuple[Tensor, KeyedJaggedTensor, Tensor]:
    """Dense features, ids and labels of all ranks. Labels depend on the ids, so there is something to learn."""
    generator = torch.Generator().manual_seed(step)
    keys = ["query", "user", "bought", "seen", "not in the model"]
    lengths = torch.randint(0, 8, (len(keys), BATCH), generator=generator)
    ids = (torch.rand(int(lengths.sum()), generator=generator) ** 3 * 800).long()
    dense = torch.randn(BATCH, DENSE, generator=generator)
    features = KeyedJaggedTensor(keys=keys, values=ids, lengths=lengths.flatten())
    # A sample is positive if it has more even ids than odd ones in the feature "seen".
    first = int(lengths[:3].sum())
    bags = torch.repeat_interleave(torch.arange(BATCH), lengths[3])
    even = 1.0 - 2 * (ids[first : first + len(bags)] % 2)
    return dense, features, (torch.zeros(BATCH).index_add_(0, bags, even) > 0).float()


def part(features: KeyedJaggedTensor, first: int, end: int) -> KeyedJaggedTensor:
    """The samples from `first` to `end`. A data loader of a real program reads just these."""
    jagged = features.to_dict()
    offsets = {key: one.offsets() for key, one in jagged.items()}
    values = [one.values()[offsets[key][first] : offsets[key][end]] for key, one in jagged.items()]
    lengths = [one.lengths()[first:end] for one in jagged.values()]
    return KeyedJaggedTensor(keys=list(jagged), values=torch.cat(values), lengths=torch.cat(lengths))


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--steps", type=int, default=30)
    steps = options.parse_args().steps

    dist.init_process_group("sennit")
    torch.set_num_threads(1)  # matrix products may round differently with another number of threads

    torch.manual_seed(0)
    collection = EmbeddingBagCollection(tables=CONFIGS)
    embeddings = from_torchrec(collection, lr=0.1, row_shards=8, placement="row_wise")
    model = DLRM(PooledVectors(), DENSE, dense_arch_layer_sizes=[64, DIM], over_arch_layer_sizes=[64, 1])
    replicas = SlicedReplicas(model)
    optimizer = torch.optim.Adam(replicas.parameters(), lr=0.003)

    own = replicas.slices.own_samples(BATCH)
    for step in range(steps):
        dense, features, labels = global_batch(step)
        found = embeddings(part(features, own.start, own.stop))  # keys in any order; others than ours are left out
        logits = replicas(dense[own], found.to_dict()).squeeze(1)
        losses = replicas.each_slice(nn.functional.binary_cross_entropy_with_logits, logits, labels[own])
        optimizer.zero_grad()
        replicas.loss(losses).backward()  # updates the rows, and sums the other gradients over all slices
        optimizer.step()
        loss = replicas.global_loss(losses)
        if dist.get_rank() == 0 and step % 10 == 9:
            print(f"step {step + 1}: loss {loss:.6f}")

    weights = hashlib.sha256(f"{embeddings.digest()} {replicas.digest()}".encode()).hexdigest()
    if dist.get_rank() == 0:
        print(f"weights {weights}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
