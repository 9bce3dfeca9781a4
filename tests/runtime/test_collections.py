# SPDX-License-Identifier: Apache-2.0
# Torch types its collectives thinly:
# mypy: disable-error-code="arg-type,no-untyped-call"
"""Sharded tables do what programs know from TorchRec's EmbeddingBagCollection and EmbeddingCollection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import embedding_bag

from sennit.runtime.kernels import Optimizer, OptimizerSpec, Pooling
from sennit.runtime.sharded import Features, PeerInputError, ShardedEmbeddingBags, ShardedEmbeddings, Slices, Table
from sennit.transport.errors import ArgumentError, ConfigError
from tests.runtime.world import WorldFactory

pytestmark = pytest.mark.timeout(180)
SGD = OptimizerSpec(kind=Optimizer.SGD)
RATE = 0.5


@dataclass(frozen=True)
class Jagged:
    """A global batch in the shape of TorchRec's KeyedJaggedTensor, by the ids of each bag."""

    bags: dict[str, list[list[int]]]
    weights: dict[str, list[list[float]]] | None = None

    def part(self, first: int, end: int) -> Jagged:
        def cut(of_key: dict[str, Any]) -> dict[str, Any]:
            return {key: bags[first:end] for key, bags in of_key.items()}

        return Jagged(cut(self.bags), None if self.weights is None else cut(self.weights))

    def keys(self) -> list[str]:
        return list(self.bags)

    def lengths(self) -> Tensor:
        return torch.tensor([len(bag) for bags in self.bags.values() for bag in bags], dtype=torch.int32)

    def values(self) -> Tensor:
        return torch.tensor([one for bags in self.bags.values() for bag in bags for one in bag], dtype=torch.int64)

    def weights_or_none(self) -> Tensor | None:
        if self.weights is None:
            return None
        return torch.tensor([one for bags in self.weights.values() for bag in bags for one in bag])


def table(name: str, *features: str, rows: int = 10, dim: int = 4, **options: Any) -> Table:
    return Table(name=name, features=features, rows=rows, dim=dim, optimizer=SGD, row_shards=2, **options)


def rows_of(module: ShardedEmbeddingBags | ShardedEmbeddings, number: int) -> Tensor:
    """All rows of a table, from all ranks."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, {held.name: held.weight.clone() for held in module.held()})
    one = module.tables[number]
    rows = torch.empty(one.rows, one.dim)
    for name, weight in (item for held in everyone for item in held.items()):
        owner, _, shard = name.rpartition("/")
        if owner == one.name:
            row, column = map(int, shard.split("."))
            rows[slice(*one.row_range(row)), slice(*one.column_range(column))] = weight
    return rows


def own_samples(batch: Jagged) -> slice:
    count = len(next(iter(batch.bags.values())))
    slices = Slices(rank=dist.get_rank(), world_size=dist.get_world_size())
    return slices.own_samples(count)


def look_up(module: Any, batch: Jagged) -> dict[str, Tensor]:
    own = own_samples(batch)
    count = len(next(iter(batch.bags.values())))
    found: dict[str, Tensor] = module(batch.part(own.start, own.stop), global_batch=count)
    return found


def check_bags(tables: list[Table], batch: Jagged, placement: str, outputs: list[str]) -> None:
    """Outputs and one step of SGD are those of torch's embedding bags, whose weights are copies of the rows."""
    module = ShardedEmbeddingBags(tables, lr=RATE, placement=placement, gradients="sum")
    found = look_up(module, batch)
    assert list(found) == outputs
    own = own_samples(batch)
    rows = [rows_of(module, number).requires_grad_() for number in range(len(tables))]
    expected = {}
    lookups = [(number, feature) for number, one in enumerate(tables) for feature in one.features]
    for output, (number, feature) in zip(outputs, lookups, strict=True):
        bags = batch.bags[feature]
        weights = batch.weights[feature] if batch.weights is not None else None
        expected[output] = embedding_bag(
            torch.tensor([one for bag in bags for one in bag], dtype=torch.int64),
            rows[number],
            torch.tensor([sum(map(len, bags[:end])) for end in range(len(bags))]),
            mode=tables[number].pooling.value,
            per_sample_weights=None if weights is None else torch.tensor([one for bag in weights for one in bag]),
        )
        torch.testing.assert_close(found[output], expected[output][own])
    torch.autograd.backward([vectors.square().sum() for vectors in found.values()])
    torch.autograd.backward([vectors.square().sum() for vectors in expected.values()])
    for number, weight in enumerate(rows):
        assert weight.grad is not None
        torch.testing.assert_close(rows_of(module, number), weight.detach() - RATE * weight.grad)


BAGS = {
    "f1": [[0, 1], [], [2], [9, 9, 9], [4], [], [7, 3], [5]],
    "f2": [[], [8], [1, 2, 3], [], [6], [0], [], [2, 2]],
    "f3": [[3], [3], [3], [3], [], [], [], [1]],
}
MEAN = Pooling.MEAN


def unshared(rank: int, world: int, placement: str) -> None:
    """Tables of different widths, empty bags."""
    check_bags([table("t1", "f1"), table("t2", "f2", dim=6)], Jagged(BAGS), placement, ["f1", "f2"])


def one_table_of_two_features(rank: int, world: int, placement: str) -> None:
    check_bags([table("t1", "f1", "f2"), table("t2", "f3")], Jagged(BAGS), placement, ["f1", "f2", "f3"])


def one_feature_of_two_tables(rank: int, world: int, placement: str) -> None:
    tables = [table("t1", "f1", "f2"), table("t2", "f1", dim=8, pooling=MEAN)]
    check_bags(tables, Jagged(BAGS), placement, ["f1@t1", "f2", "f1@t2"])
    with pytest.raises(ConfigError, match="two outputs are called f1@t1"):
        ShardedEmbeddingBags([table("t1", "f1", "f1")], lr=RATE)
    with pytest.raises(ConfigError, match="two outputs are called f1@t2"):
        ShardedEmbeddingBags([*tables, table("t3", "f1@t2")], lr=RATE)


def means(rank: int, world: int, placement: str) -> None:
    check_bags([table("t1", "f1", pooling=MEAN), table("t2", "f2")], Jagged(BAGS), placement, ["f1", "f2"])


def weighted(rank: int, world: int, placement: str) -> None:
    weights = {key: [[0.5 * (one + 1) for one in bag] for bag in bags] for key, bags in BAGS.items()}
    tables = [table("t1", "f1"), table("t2", "f2", "f3")]
    check_bags(tables, Jagged(BAGS, weights), placement, ["f1", "f2", "f3"])
    # As TorchRec's: the same module takes batches without weights, too.
    check_bags(tables, Jagged(BAGS), placement, ["f1", "f2", "f3"])


def other_keys(rank: int, world: int, placement: str) -> None:
    """Keys in another order than the tables', and keys that no table has."""
    given = {"unused": [[99]] * 8, "f2": BAGS["f2"], "other": [[]] * 8, "f1": BAGS["f1"]}
    check_bags([table("t1", "f1"), table("t2", "f2")], Jagged(given), placement, ["f1", "f2"])


def missing_key(rank: int, world: int, placement: str) -> None:
    module = ShardedEmbeddingBags([table("t1", "f1"), table("t2", "f2")], lr=RATE, placement=placement)
    before = module.digest()
    with pytest.raises(ArgumentError, match="no ids for feature f2; given: f1, f3"):
        look_up(module, Jagged({"f1": BAGS["f1"], "f3": BAGS["f3"]}))
    assert module.digest() == before


def all_bags_empty(rank: int, world: int, placement: str) -> None:
    empty: dict[str, list[list[int]]] = {"f1": [[]] * 8, "f2": [[]] * 8}
    check_bags([table("t1", "f1"), table("t2", "f2", pooling=MEAN)], Jagged(empty), placement, ["f1", "f2"])


def fewer_samples_than_slices(rank: int, world: int, placement: str) -> None:
    """Ranks without a sample take part, and so does a batch without any."""
    tables = [table("t1", "f1", column_shards=2), table("t2", "f2", pooling=MEAN)]
    for count in (1, 5):
        batch = Jagged({"f1": BAGS["f1"][:count], "f2": [[1, 2]] * count})
        check_bags(tables, batch, placement, ["f1", "f2"])
    module = ShardedEmbeddingBags(tables, lr=RATE, placement=placement)
    before = module.digest()
    for nothing in (Jagged({"f1": [], "f2": []}), dict.fromkeys(["f1", "f2"], torch.zeros(0, dtype=torch.int64))):
        found = module(nothing)
        assert [tuple(vectors.shape) for vectors in found.values()] == [(0, 4), (0, 4)]
        torch.autograd.backward([vectors.sum() for vectors in found.values()])
    assert module.digest() == before


class Failing(Jagged):
    def values(self) -> Tensor:
        raise RuntimeError("the loader failed")


def wrong_input(rank: int, world: int, placement: str) -> None:
    """What one rank gives wrong, of whatever kind, is raised on all ranks, and the next call is as if nothing was."""
    module = ShardedEmbeddingBags([table("t1", "f1")], lr=RATE, placement=placement)
    own = own_samples(Jagged(BAGS))
    good = Jagged({"f1": BAGS["f1"]}).part(own.start, own.stop)
    ids = torch.zeros(own.stop - own.start, dtype=torch.int64)
    lengths, weights = torch.ones(1, len(ids), dtype=torch.int32), torch.ones(len(ids), dtype=torch.float64)
    cases: list[tuple[Any, type[Exception], str]] = [
        (None, ArgumentError, "ids are a NoneType; allowed: a mapping"),
        (ids, ArgumentError, "ids are a Tensor; allowed: a mapping"),
        ({"f1": "ids"}, ArgumentError, "feature f1 is a str; allowed: int32 or int64"),
        (
            {"f1": ids.view(torch.uint64)},
            ArgumentError,
            r"torch.uint64 .* takes as \.view\(torch\.int64\); allo",
        ),
        (Features(lengths=lengths, values=[ids]), ArgumentError, "a Features whose values are a list, and no tensor"),
        (Failing(good.bags), RuntimeError, "the loader failed"),
        (Features(lengths=lengths, values=ids, weights=weights), ArgumentError, "weights are torch.float64"),
    ]
    bad = rank == world - 1
    for wrong, error, match in cases:
        expected, message = (error, match) if bad else (PeerInputError, f"the input of rank {world - 1} is wrong")
        with pytest.raises(expected, match=message):
            module(wrong if bad else good, global_batch=8)
        module(good, global_batch=8)
    options: list[dict[str, Any]] = [{"features": "f1"}, {"pooling": "avg"}, {"optimizer": 3}, {"bounds": None}]
    for wrong in [*options, {"optimizer": "adem"}]:
        with pytest.raises(ConfigError, match=f"table t: {next(iter(wrong))} .*; allowed: "):
            Table(name="t", rows=10, dim=4, **wrong)
    assert Table(name="t", rows=10, dim=4, optimizer="AdamW").optimizer == OptimizerSpec.named("adamw")


def sequences(rank: int, world: int, placement: str) -> None:
    """A row for each id, in the order of the ids; tables share a feature, and a table has two."""
    none = Pooling.NONE
    tables = [table("t1", "f1", "f2", pooling=none), table("t2", "f1", dim=6, pooling=none)]
    module = ShardedEmbeddings(tables, lr=RATE, placement=placement, gradients="sum")
    batch = Jagged(BAGS)
    found = look_up(module, batch)
    assert list(found) == ["f1@t1", "f2", "f1@t2"]
    own = own_samples(batch)
    rows = [rows_of(module, number).requires_grad_() for number in range(2)]
    for output, (number, feature) in zip(found, [(0, "f1"), (0, "f2"), (1, "f1")], strict=True):
        ids = [one for bag in BAGS[feature][own] for one in bag]
        assert torch.equal(found[output], rows[number].detach()[ids])
        rows[number][[one for bag in BAGS[feature] for one in bag]].square().sum().backward()
    torch.autograd.backward([vectors.square().sum() for vectors in found.values()])
    for number, weight in enumerate(rows):
        assert weight.grad is not None
        torch.testing.assert_close(rows_of(module, number), weight.detach() - RATE * weight.grad)


CASES = (
    unshared,
    one_table_of_two_features,
    one_feature_of_two_tables,
    means,
    weighted,
    other_keys,
    missing_key,
    all_bags_empty,
    fewer_samples_than_slices,
    wrong_input,
    sequences,
)


@pytest.mark.parametrize("placement", ["table_wise", "row_wise", "data_parallel"])
@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_a_collection(kept_world: WorldFactory, case: Callable[..., Any], world: int, placement: str) -> None:
    kept_world(world).run(case, placement=placement)
