# SPDX-License-Identifier: Apache-2.0
"""Training of tables whose ids nobody lists, for tests of their bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sennit.runtime.sharded import DynamicIds, ShardedEmbeddingBags, ShardedEmbeddings, Table, TableStore

SAMPLES = 48
TABLE: dict[str, Any] = {"row_shards": 4, "column_shards": 2, "optimizer": "adam", "precision": "bf16"}


def rarely_and_long_ago(ids: Tensor, counts: Tensor, ages: Tensor) -> Tensor:
    return counts / (1.0 + ages) + (ids % 3)


FORMS = {
    "lru": (600, DynamicIds()),
    "lfu": (600, DynamicIds(eviction="lfu")),
    "second": (100, DynamicIds(admit_after=2, evicted_share=0.25)),
    "sketch": (100, DynamicIds(admit_after=2, admit_count="sketch", evicted_share=0.25)),
    "score": (600, DynamicIds(eviction=rarely_and_long_ago)),
    "shared": (100, DynamicIds(admit_after=2, evicted_share=0.25, expire_after=4, unadmitted="shared")),
}
"""Rows and rules."""


def ids_of(step: int, feature: int, length: int) -> Tensor:
    """Drifting ids: some come again and again, others once. Any 64 bits."""
    draw = torch.Generator().manual_seed(100 * step + feature)
    hot = (torch.rand(SAMPLES, length, generator=draw) ** 3 * 60).to(torch.int64) * 0x1234567890AB - 2**40
    new = torch.randint(-(2**62), 2**62, (SAMPLES, length), generator=draw)
    return torch.where(torch.rand(SAMPLES, length, generator=draw) < 0.7, hot + step // 3, new)


def store_in(folder: str | None, memory_bytes: int) -> TableStore | None:
    return None if folder is None else TableStore(folder=Path(folder), memory_bytes=memory_bytes)


def trained(
    rank: int,
    world: int,
    form: str,
    kind: str,
    steps: int,
    options: dict[str, Any],
    placement: str,
    folder: str | None = None,
    device: torch.device | None = None,
    implementation_name: str | None = None,
) -> tuple[str, dict[str, int], dict[str, int]]:
    """`device`, `implementation_name`: of the fixed table beside it, of results and of gradients."""
    is_bags = kind == "bags"
    table = Table(
        name="user",
        rows=FORMS[form][0],
        dim=8,
        features=("a", "b") if is_bags else (),
        ids=FORMS[form][1],
        pooling="sum" if is_bags else "none",
        **options,
    )
    fixed = Table(name="fixed", rows=50, dim=8, row_shards=4, column_shards=2, pooling="sum" if is_bags else "none")
    kind_of = ShardedEmbeddingBags if is_bags else ShardedEmbeddings
    store = store_in(folder, 44_000)
    module = kind_of(
        [table, fixed],
        lr=0.1,
        gradients="sum",
        placement=placement,
        seed=7,
        store=store,
        device=device or "cpu",
        implementation_name=implementation_name,
    )
    factors = torch.linspace(0.5, 1.5, 8).to(device or "cpu")
    own = module.slices.own_samples(SAMPLES)
    for step in range(steps):
        given = {name: ids_of(step, number, 3)[own] for number, name in enumerate(("a", "b") if is_bags else ("user",))}
        found = module({**given, "fixed": ids_of(step, 9, 2)[own] % 50}, global_batch=SAMPLES)
        loss = sum((one * factors).pow(2).sum() for one in found.values())
        loss.backward()
        if step % 5 == 4:
            with torch.no_grad():
                module({**given, "fixed": ids_of(step, 9, 2)[own] % 50}, global_batch=SAMPLES)
        if step % 7 == 3 and table.rows > SAMPLES * 6:
            # Rows of ids begin, though nothing follows.
            del found, loss
            module({**given, "fixed": ids_of(step, 9, 2)[own] % 50}, global_batch=SAMPLES)
    found_all = module.digest(), module.id_counters().get("user", {}), module.cache_counters()
    module.close()
    return found_all
