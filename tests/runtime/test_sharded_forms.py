# SPDX-License-Identifier: Apache-2.0
# Torch types its collectives thinly:
# mypy: disable-error-code="arg-type,no-untyped-call"
"""Ids in the forms that programs have, results in the forms that they want, and settings of tables by name."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor, nn

from sennit.runtime.kernels import Bounds, Optimizer, OptimizerSpec, Pooling, Precision, Rounding
from sennit.runtime.sharded import (
    DynamicIds,
    Features,
    Home,
    KeyedVectors,
    ShardedEmbeddingBags,
    ShardedEmbeddings,
    Table,
    tables,
)
from sennit.runtime.sharded.forms import bags_of
from sennit.transport.errors import ArgumentError, ConfigError
from tests.runtime.sharded_training import rows_of
from tests.runtime.world import WorldFactory

pytestmark = pytest.mark.timeout(120)

SGD = OptimizerSpec(kind=Optimizer.SGD)
BAGS = [[3, 4], [], [5], [1, 1, 2], [0], [7], [], [2, 9]]
IDS = torch.tensor([one for bag in BAGS for one in bag])
LENGTHS = torch.tensor([len(bag) for bag in BAGS])
OFFSETS = torch.cumsum(LENGTHS, 0) - LENGTHS
WEIGHTS = torch.linspace(-1, 1, len(IDS))
TENSORS = [torch.tensor(bag, dtype=torch.int64) for bag in BAGS]
READ_ONLY = np.frombuffer(OFFSETS.numpy().tobytes(), dtype=np.int64)


def jagged() -> Tensor:
    ends = torch.cat([OFFSETS, torch.tensor([len(IDS)])])
    return torch.nested.nested_tensor_from_jagged(IDS, ends)


def strided() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls this layout a prototype.
        return torch.nested.nested_tensor(TENSORS)


FORMS: dict[str, Callable[[], Any]] = {
    "ids and offsets": lambda: (IDS, OFFSETS),
    "int32 and offsets": lambda: (IDS.int(), OFFSETS.int()),
    "arrays": lambda: (IDS.numpy(), READ_ONLY),
    "arrays of another order": lambda: (IDS.numpy().astype(">i8"), np.repeat(READ_ONLY, 2)[::2]),
    "lists": lambda: BAGS,
    "a list of tensors": lambda: TENSORS,
    "a list of arrays": lambda: [one.numpy() for one in TENSORS],
    "an array of lists": lambda: np.array(BAGS, dtype=object),
    "nested, jagged": jagged,
    "nested, strided": strided,
    "nested, with holes": lambda: torch.nested.narrow(
        nn.utils.rnn.pad_sequence(TENSORS, batch_first=True), 1, 0, LENGTHS, layout=torch.jagged
    ),
    "features": lambda: Features.from_offsets(IDS, OFFSETS),
    "a JaggedTensor": lambda: SimpleNamespace(
        lengths=lambda: LENGTHS, values=lambda: IDS, weights_or_none=lambda: None
    ),
    "weighted": lambda: (IDS, OFFSETS, WEIGHTS),
    "weighted lists": lambda: (BAGS, None, WEIGHTS.numpy()),
    "weighted features": lambda: Features.from_offsets(IDS, OFFSETS, weights=WEIGHTS),
}


@pytest.mark.parametrize("form", FORMS)
def test_bags_are_read_in_all_forms(form: str) -> None:
    lengths, values, weights = bags_of("user", FORMS[form]())
    assert lengths.tolist() == LENGTHS.tolist()
    assert values.tolist() == IDS.tolist()
    assert (weights is not None) == form.startswith("weighted")
    assert weights is None or torch.equal(weights, WEIGHTS)


@pytest.mark.parametrize(
    ("given", "lengths", "values"),
    [
        (torch.tensor([[1, 2], [3, 4]]), [2, 2], [1, 2, 3, 4]),
        (np.array([[1, 2], [3, 4]], dtype=np.int32), [2, 2], [1, 2, 3, 4]),
        (np.arange(6)[::2], [1, 1, 1], [0, 2, 4]),
        ([5, 6, 7], [1, 1, 1], [5, 6, 7]),
        ([torch.tensor(5), np.int64(6), [7, 8], range(2)], [1, 1, 2, 2], [5, 6, 7, 8, 0, 1]),
        ([], [], []),
        ([[], []], [0, 0], []),
        ((torch.tensor([], dtype=torch.int64), torch.tensor([], dtype=torch.int64)), [], []),
        ((torch.tensor([[1, 2], [3, 4]]), None), [2, 2], [1, 2, 3, 4]),
    ],
)
def test_samples_may_have_one_id_or_equally_many(given: Any, lengths: list[int], values: list[int]) -> None:
    found = bags_of("user", given)
    assert (found.lengths.tolist(), found.values.tolist()) == (lengths, values)
    assert found.values.dtype in (torch.int32, torch.int64)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        (None, "feature user is a NoneType; allowed: int32 or int64"),
        ("12", "feature user is a str; allowed"),
        (torch.zeros(2, 2, 2, dtype=torch.int64), r"feature user is torch.int64 of shape \(2, 2, 2\)"),
        (torch.zeros(3), r"feature user: ids are torch.float32 of shape \(3,\); allowed"),
        ([1.5, 2.0], "feature user: ids are torch.float32"),
        ([["a"], ["b"]], "feature user: "),
        (np.array(["a", "b"]), "feature user is a ndarray; allowed"),
        ((1, 2), "feature user: offsets are a int; allowed: a tensor or an array, or None"),
        ((1, 2, 3, 4), "feature user is a tuple of 4 parts"),
        (torch.ones(2, 2, dtype=torch.int64).to_sparse(), "feature user is a sparse tensor"),
        (torch.ones(2, dtype=torch.int64, device="meta"), "feature user is a meta tensor"),
        ((IDS, OFFSETS, WEIGHTS, WEIGHTS), "feature user is a tuple of 4 parts"),
        ((BAGS, OFFSETS), "feature user: offsets for ids that are in bags; allowed: None"),
        ((IDS, OFFSETS + 1), "the first offset is 1; allowed: 0"),
        ((IDS, OFFSETS.float()), "offsets are torch.float32"),
        ((IDS, torch.tensor([0, 3, 2])), "offset 3 at position 1; allowed: at most 2, what follows"),
        ((IDS, torch.tensor([0, 99])), "offset 99 at position 1; allowed: at most 10, what follows"),
        ((IDS, torch.tensor([], dtype=torch.int64)), "no offsets for 10 ids"),
        (
            [IDS, OFFSETS],
            r"feature user is a list of two tensors: .*; allowed: the tuple \(ids, offsets\), or a list of",
        ),
        ([IDS, torch.tensor([0, 10])], "feature user is a list of two tensors"),
        ((IDS, OFFSETS, WEIGHTS.double()), r"weights are torch.float64 of shape \(10,\); allowed: float32 of \(10,\)"),
        ((IDS, OFFSETS, WEIGHTS[1:]), r"weights are torch.float32 of shape \(9,\)"),
        ((IDS, OFFSETS, "heavy"), "weights are a str; allowed"),
        (SimpleNamespace(lengths=LENGTHS, values=IDS[1:]), "feature user: lengths of 10 ids in all, but 9 ids"),
        (SimpleNamespace(lengths=None, values=IDS), "feature user: lengths are a NoneType"),
    ],
)
def test_other_forms_are_refused_by_name(given: Any, match: str) -> None:
    with pytest.raises(ArgumentError, match=match):
        bags_of("user", given)


def test_features_are_made_from_offsets() -> None:
    """As `nn.EmbeddingBag` and FBGEMM have them, for one feature or several, with or without the last one."""
    ends = torch.cat([OFFSETS, torch.tensor([len(IDS)])])
    for found in (
        Features.from_offsets(IDS, OFFSETS, features=2),
        Features.from_offsets(IDS, ends, names=("a", "b"), include_last_offset=True),
    ):
        assert found.lengths.tolist() == LENGTHS.view(2, 4).tolist()
        assert found.values is IDS
    bags = bags_of("user", (IDS, ends), include_last_offset=True)
    assert (bags.lengths.tolist(), bags.values.tolist()) == (LENGTHS.tolist(), IDS.tolist())
    with pytest.raises(ArgumentError, match="the last offset is 8; allowed: 10, where the ids end"):
        bags_of("user", (IDS, OFFSETS), include_last_offset=True)
    assert Features.from_offsets(IDS, OFFSETS, names=("a",), weights=WEIGHTS).weights is WEIGHTS
    for offsets, options, match in (
        (OFFSETS, {"features": 3}, "8 offsets for 3 features; allowed: one for each sample of each"),
        (OFFSETS, {"include_last_offset": True}, "the last offset is 8; allowed: 10, where the ids end"),
        (OFFSETS[:0], {"include_last_offset": True}, "there are no offsets; allowed: 10"),
    ):
        with pytest.raises(ArgumentError, match=match):
            Features.from_offsets(IDS, offsets, **options)


def test_settings_of_tables_are_given_by_name() -> None:
    table = Table(
        name="user", rows=10, dim=4, pooling="Mean", precision="bf16", rounding="nearest", bounds="wrap", home="dram",
        features=["seen", "bought"],
    )  # fmt: skip
    assert (table.pooling, table.precision, table.rounding) == (Pooling.MEAN, Precision.BF16, Rounding.NEAREST)
    assert (table.bounds, table.home, table.features) == (Bounds.WRAP, Home.DRAM, ("seen", "bought"))
    for given in ("fp16", "float16", torch.float16, torch.half, Precision.FP16):
        assert Table(name="user", rows=10, dim=4, precision=given).precision is Precision.FP16
    for what, wrong, allowed in (
        ("pooling", "avg", "sum, mean, none"),
        ("pooling", None, "sum, mean, none"),
        ("precision", "int8", "fp32, fp16, bf16"),
        ("precision", torch.int8, "fp32, fp16, bf16"),
        ("rounding", 1, "nearest, stochastic"),
        ("bounds", None, "error, wrap, ignore"),
        ("home", "disk", "file, dram, hbm"),
        ("features", "seen", "a tuple or a list of names"),
        ("initial", "zeros", "a function of rows"),
        ("optimizer", 1, "an OptimizerSpec, a member of Optimizer, or a name"),
    ):
        with pytest.raises(ConfigError, match=f"table user: {what} {wrong}; allowed: {allowed}"):
            Table(name="user", rows=10, dim=4, **{what: wrong})


def test_optimizers_of_tables_are_given_as_people_write_them() -> None:
    """One for the module is refused where the mistake is, before any rank waits."""
    spec = OptimizerSpec(kind=Optimizer.ADAM)
    for given in ("adam", "Adam", Optimizer.ADAM, spec):
        assert Table(name="user", rows=10, dim=4, optimizer=given).optimizer == spec
    with pytest.raises(
        ConfigError, match=r"optimizer adam for all tables; allowed: Table\(optimizer=\.\.\.\), for each"
    ):
        ShardedEmbeddingBags([Table(name="user", rows=10, dim=4)], lr=0.1, optimizer="adam")


def test_type_checkers_see_all_settings_of_a_table() -> None:
    """The constructor that they read is written by hand, beside the generated one."""
    written = {
        own.name: node
        for own in ast.parse(inspect.getsource(tables)).body
        if isinstance(own, ast.ClassDef)
        for node in ast.walk(own)
        if isinstance(node, ast.FunctionDef) and node.name == "__init__"
    }
    for kind in (Table, DynamicIds):
        found = [argument.arg for argument in written[kind.__name__].args.kwonlyargs]
        assert found == [one.name for one in dataclasses.fields(kind)]


def table(name: str, *features: str, **options: Any) -> Table:
    return Table(name=name, features=features, rows=10, dim=4, row_shards=2, optimizer=SGD, **options)


def torch_bags(rank: int, world: int) -> None:
    """Each form gives what nn.EmbeddingBag gives for its own arguments, and the same step."""
    tables = [table("user", "user"), table("item", "item", pooling="mean"), table("word", "user", "item")]
    module = ShardedEmbeddingBags(tables, lr=0.5, placement="row_wise", gradients="sum")
    own = module.slices.own_samples(8)
    first, end = int(LENGTHS[: own.start].sum()), int(LENGTHS[: own.stop].sum())
    ids, offsets, weights = IDS[first:end], OFFSETS[own] - first, WEIGHTS[first:end]
    reference = nn.EmbeddingBag.from_pretrained(rows_of(module, world), mode="sum", freeze=False)
    plain = module({"user": (ids, offsets), "item": np.arange(8)[own]})
    torch.testing.assert_close(plain["user@user"], reference(IDS, OFFSETS)[own])
    for given in (BAGS[own], TENSORS[own], list(jagged().unbind())[own], Features.from_offsets(ids, offsets)):
        found = module({"user": given, "item": list(range(8))[own], "nobody's": None})
        assert all(torch.equal(one, plain[name]) for name, one in found.items())
    ending = ShardedEmbeddingBags(tables, lr=0.5, placement="row_wise", include_last_offset=True)
    ends = torch.cat([offsets, torch.tensor([len(ids)])])
    found = ending({"user": (ids, ends, weights), "item": np.arange(8)[own]})
    beside = nn.EmbeddingBag.from_pretrained(reference.weight, mode="sum", include_last_offset=True)
    torch.testing.assert_close(found["user@user"], beside(ids, ends, weights))
    mine = weights.clone().requires_grad_()
    found = module({"user": (ids, offsets, mine), "item": torch.arange(8)[own]})
    torch.testing.assert_close(found["user@user"], reference(IDS, OFFSETS, WEIGHTS)[own])
    assert torch.equal(found["item@item"], plain["item@item"])
    found["user@user"].square().sum().backward()
    whole = WEIGHTS.clone().requires_grad_()
    before = reference.weight.detach().clone()
    reference(IDS, OFFSETS, whole).square().sum().backward()
    assert mine.grad is not None
    assert whole.grad is not None
    assert reference.weight.grad is not None
    torch.testing.assert_close(mine.grad, whole.grad[first:end])
    torch.testing.assert_close(rows_of(module, world), before - 0.5 * reference.weight.grad)
    frame = module(Frame({"item": np.arange(8)[own], "user": np.array(BAGS, dtype=object)[own]}))
    assert list(frame) == list(plain)
    with pytest.raises(ArgumentError, match=r"of different numbers of samples: {'user': \d, 'item': 1}; allowed"):
        module({"user": BAGS[own], "item": [1]})


class Frame:
    """Has the columns of a DataFrame by name, and is no Mapping."""

    def __init__(self, columns: dict[str, Any]) -> None:
        self._columns = columns

    def keys(self) -> list[str]:
        return list(self._columns)

    def __iter__(self) -> Any:
        return iter(self._columns)

    def __contains__(self, name: str) -> bool:
        return name in self._columns

    def __getitem__(self, name: str) -> Any:
        return self._columns[name]


def forms_of_results(rank: int, world: int, kind: str) -> None:
    """All forms of results have the numbers and the gradients of the dict."""
    is_pooled = kind == "bags"
    made: Any = ShardedEmbeddingBags if is_pooled else ShardedEmbeddings
    pooling = "sum" if is_pooled else "none"
    tables = [table("user", "user", pooling=pooling, bounds="ignore"), table("item", "item", pooling=pooling)]

    def module_of(outputs: str) -> Any:
        return made(tables, lr=0.5, placement="row_wise", gradients="sum", outputs=outputs)

    plain = module_of("dict")
    own = plain.slices.own_samples(8)
    given = {"user": [[*bag, -1] for bag in BAGS][own], "item": BAGS[own]}
    rows = plain(given)
    (rows["user"].square().sum() + rows["item"].sum()).backward()
    plain.check()
    if not is_pooled:
        module = module_of("nested")
        found = module(given)
        assert all(one.layout is torch.jagged for one in found.values())
        assert [len(one) for one in found["user"].unbind()] == [len(one) for one in given["user"]]
        assert all(torch.equal(one.values(), rows[name]) for name, one in found.items())
        (found["user"].values().square().sum() + found["item"].values().sum()).backward()
        module.check()
        assert module.digest() == plain.digest()
        return
    together = torch.cat([rows["user"], rows["item"]], 1)
    for outputs in ("keyed", "tensor"):
        module = module_of(outputs)
        found = module(given)
        values = found if outputs == "tensor" else found.values()
        assert torch.equal(values, together)
        (values[:, :4].square().sum() + values[:, 4:].sum()).backward()
        module.check()
        assert module.digest() == plain.digest()
    found = module_of("keyed")(given)
    assert isinstance(found, KeyedVectors)
    assert (found.keys(), found.length_per_key(), found.offset_per_key()) == (["user", "item"], [4, 4], [0, 4, 8])
    assert torch.equal(found["item"], rows["item"])
    assert list(found.to_dict()) == ["user", "item"]
    assert (found.key_dim(), found.device().type) == (1, "cpu")
    model = nn.Sequential(module_of("tensor"), nn.Linear(8, 1))
    assert model(given).shape == (8 // world, 1)


@pytest.mark.parametrize("world", [1, 2])
def test_a_dictionary_has_what_embedding_bags_take(kept_world: WorldFactory, world: int) -> None:
    kept_world(world).run(torch_bags)


@pytest.mark.parametrize("kind", ["bags", "sequences"])
def test_results_are_given_in_several_forms(kept_world: WorldFactory, kind: str) -> None:
    kept_world(2).run(forms_of_results, kind=kind)


def refuses_forms(rank: int, world: int) -> None:
    for made, pooling, allowed in (
        (ShardedEmbeddingBags, "sum", "dict, keyed, tensor"),
        (ShardedEmbeddings, "none", "dict, nested"),
    ):
        with pytest.raises(ConfigError, match=f"outputs 'list'; allowed: {allowed}"):
            made([table("user", pooling=pooling)], lr=1, outputs="list")
    for other, pooling, words in (
        (ShardedEmbeddings, "sum", r'none, as in Table\(pooling="none"\)'),
        (ShardedEmbeddingBags, "none", r'sum, mean, as in Table\(pooling="sum"\)'),
    ):
        what = f"table user has pooling {pooling}; allowed in {other.__name__}"
        with pytest.raises(ConfigError, match=f"{what}: {words}"):
            other([table("user", pooling=pooling)], lr=1)


def test_other_forms_of_results_are_refused(kept_world: WorldFactory) -> None:
    kept_world(1).run(refuses_forms)
