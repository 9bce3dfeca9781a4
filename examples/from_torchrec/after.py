# SPDX-License-Identifier: Apache-2.0
"""TorchRec's DLRM of `before.py` with sharded tables of sennit, which begin with the rows of TorchRec's.

    torchrun --standalone --nproc-per-node 2 examples/from_torchrec/after.py

It needs what `../torchrec_dlrm.py` needs.
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType
from torchrec.models.dlrm import DLRM
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from sennit.runtime.sharded import from_torchrec

BATCH = 256  # samples of a rank
DIM = 16


def config(name: str, rows: int, features: list[str], pooling: PoolingType = PoolingType.SUM) -> EmbeddingBagConfig:
    def fill(weight: torch.Tensor) -> torch.Tensor:
        # DistributedModelParallel fills tables anew: the numbers are to be the same ones.
        return torch.nn.init.normal_(weight, std=0.1, generator=torch.Generator().manual_seed(rows))

    return EmbeddingBagConfig(
        name=name, num_embeddings=rows, embedding_dim=DIM, feature_names=features, pooling=pooling, init_fn=fill
    )


CONFIGS = [
    config("user", 5_000, ["user"]),
    config("item", 2_000, ["bought", "seen"]),
    config("word", 800, ["query"], PoolingType.MEAN),
]


def batch(step: int, rank: int) -> tuple[torch.Tensor, KeyedJaggedTensor, torch.Tensor]:
    """Dense features, ids and labels of a rank. Labels depend on the ids, so there is something to learn."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    lengths = torch.randint(0, 8, (4, BATCH), generator=generator)
    ids = (torch.rand(int(lengths.sum()), generator=generator) ** 3 * 800).long()
    bags = torch.repeat_interleave(torch.arange(BATCH), lengths[0])
    even = 1.0 - 2 * (ids[: len(bags)] % 2)
    labels = (torch.zeros(BATCH).index_add_(0, bags, even) > 0).float()
    features = KeyedJaggedTensor(keys=["seen", "user", "bought", "query"], values=ids, lengths=lengths.flatten())
    return torch.randn(BATCH, 13, generator=generator), features, labels


def main() -> None:
    dist.init_process_group("sennit")
    torch.manual_seed(0)
    tables = EmbeddingBagCollection(tables=CONFIGS)
    apply_optimizer_in_backward(torch.optim.SGD, tables.parameters(), {"lr": 0.5})
    dlrm = DLRM(from_torchrec(tables), 13, dense_arch_layer_sizes=[64, DIM], over_arch_layer_sizes=[64, 1])
    model = DistributedDataParallel(dlrm)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)

    for step in range(30):
        dense, features, labels = batch(step, dist.get_rank())
        logits = model(dense, features).squeeze(1)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 9:
            whole = loss.detach() / dist.get_world_size()
            dist.all_reduce(whole)
            if dist.get_rank() == 0:
                print(f"step {step + 1}: loss {whole:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
