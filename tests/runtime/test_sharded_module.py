# SPDX-License-Identifier: Apache-2.0
# Torch types its collectives thinly:
# mypy: disable-error-code="no-untyped-call"
"""Modules of sharded tables under what torch's own tests of modules do: hooks, states, conversions, containers.

The tests of `test/test_modules.py`, `test/nn/test_module_hooks.py` and `test/distributed/checkpoint/test_state_dict.py`
that have a meaning here, by our own code. docs/reference/sharded.md names the others, with the reason.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.nn.parallel import DistributedDataParallel

from sennit.runtime.sharded import ShardedEmbeddingBags, ShardedEmbeddings, Table
from sennit.transport.errors import ArgumentError, Unsupported
from tests.runtime.frameworks.torch_own_tests import own_tests
from tests.runtime.world import WorldFactory

pytestmark = pytest.mark.timeout(120)

KINDS = ("bags", "sequences")
LEAST_OF_TORCH = 8
"""Of torch's own tests of modules."""


def made(kind: str, **options: Any) -> Any:
    tables = [
        Table(name=name, rows=10, dim=4, row_shards=2, pooling="sum" if kind == "bags" else "none")
        for name in ("user", "item")
    ]
    return (ShardedEmbeddingBags if kind == "bags" else ShardedEmbeddings)(
        tables, lr=0.5, placement="row_wise", **options
    )


def given(seed: int = 0) -> dict[str, Tensor]:
    return {"user": (torch.arange(4) + seed) % 10, "item": (torch.arange(4) * 3 + seed) % 10}


def equal(one: Any, other: Any) -> bool:
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)


def calls(rank: int, world: int, kind: str) -> None:
    """test_repr, test_if_train_and_eval_modes_differ, test_non_contiguous_tensors, functional calls, containers."""
    module = made(kind)
    assert repr(module) == str(module)
    assert "<table user: 10 rows of 4, lr 0.5>" in repr(nn.Sequential(module))
    plain = module(given())
    assert equal(module.eval()(given()), plain)
    assert not module.training
    assert not module.handles.training
    assert module.train().training
    spread = {name: one.repeat_interleave(2)[::2] for name, one in given().items()}
    assert not any(one.is_contiguous() for one in spread.values())
    assert equal(module(spread), plain)
    functional = torch.func.functional_call(module, dict(module.named_parameters()), (given(),))
    assert equal(functional, plain)
    held = nn.ModuleDict({"a": module, "b": module})
    assert [name for name, _ in held.named_parameters()] == ["a.handles.user", "a.handles.item"]
    assert [type(one) for one in module.children()] == [type(module.handles)]
    assert module.get_submodule("handles") is module.handles
    assert list(module.buffers()) == []
    seen: list[nn.Module] = []
    assert module.apply(seen.append) is module
    assert seen == [module.handles, module]
    module.register_buffer("seen", torch.zeros(2))
    module.register_parameter("scale", nn.Parameter(torch.ones(1)))
    assert {"seen", "scale"} <= module.state_dict().keys()
    assert module(given())["user"].shape == (4, 4)


def converts(rank: int, world: int, kind: str) -> None:
    """test_to, test_to_empty, test_factory_kwargs, test_memory_format, zero_grad, requires_grad_: done, or refused."""
    module = made(kind)
    plain, before = module(given()), module.digest()
    for same in (
        lambda: module.to("cpu"), lambda: module.to(torch.float32), module.float, module.cpu,
        lambda: module.to(memory_format=torch.channels_last), lambda: module.type(torch.float32),
    ):  # fmt: skip
        assert same() is module
    model = nn.Sequential(module)
    for call, what in (
        (model.double, "in another precision"),
        (model.bfloat16, "in another precision"),
        (lambda: model.type(torch.float16), "in another precision"),
        (lambda: model.to_empty(device="meta"), "on another device"),
        (model.share_memory, "in shared memory"),
    ):
        with pytest.raises(Unsupported, match=f"sharded tables {what}"):
            call()
    with torch.device("meta"), pytest.raises(Unsupported, match="sharded tables on the device meta"):
        made(kind)
    assert model.to_empty(device="cpu") is model
    assert not any(one.any() for one in model.parameters())
    assert equal(module(given()), plain)
    with pytest.raises(TypeError, match="dtype"):
        made(kind, dtype=torch.float16)
    assert made(kind, device="cpu").device == torch.device("cpu")
    assert all(not one.any() for one in module.parameters())
    for set_to_none in (True, False):
        torch.stack([one.sum() for one in module(given()).values()]).sum().backward()
        assert all(one.grad is not None for one in module.parameters())
        module.zero_grad(set_to_none=set_to_none)
        assert all((one.grad is None) == set_to_none for one in module.parameters())
    module.requires_grad_(False)
    assert not any(one.requires_grad for one in module.parameters())
    assert module.digest() != before
    assert not equal(module(given()), plain)


def hooks(rank: int, world: int, kind: str) -> None:
    """Hooks of calls: before, with keywords, after, also after an error, global ones. None is left when removed."""
    module = made(kind)
    plain, seen = module(given()), list[str]()

    def before(called: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        seen.append("before")
        assert called is module
        return (given(1),), {**named, "global_batch": 4 * world}

    def after(called: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any], found: Any) -> Any:
        seen.append("after")
        assert named == {"global_batch": 4 * world}
        return {"seen": found["user"]}

    handles = [
        module.register_forward_pre_hook(before, with_kwargs=True),
        module.register_forward_hook(after, with_kwargs=True),
        nn.modules.module.register_module_forward_pre_hook(lambda *_: seen.append("global")),
        module.register_forward_hook(lambda *_: seen.append("always"), always_call=True),
    ]
    found = module({"user": "is replaced"})
    assert seen == ["global", "before", "after", "always"]
    assert torch.equal(found["seen"], made(kind)(given(1))["user"])
    handles[0].remove()
    del seen[:]
    with pytest.raises(ArgumentError, match="feature user is a str"):
        module({"user": "is wrong"})
    assert seen == ["global", "always"]
    for handle in handles:
        handle.remove()
    assert equal(module(given()), plain)


def backward_hooks(rank: int, world: int) -> None:
    """Full backward hooks see the gradient of one tensor, and may replace it. The step has what they return."""
    module, other = (made("bags", outputs="tensor") for _ in range(2))
    seen = []

    def before(called: nn.Module, gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        seen.append(gradients[0].clone())
        return (gradients[0] * 2,)

    def after(called: nn.Module, inputs: Any, outputs: tuple[Tensor, ...]) -> None:
        seen.append(outputs[0].clone())

    with module.register_full_backward_pre_hook(before), module.register_full_backward_hook(after):
        warnings.filterwarnings("ignore", message="Full backward hook is firing")  # Ids require no gradients.
        module(given()).sum().backward()
    (other(given()) * 2).sum().backward()
    assert [one.unique().tolist() for one in seen] == [[1], [2]]
    module.check()
    assert module.digest() == other.digest()


def state_hooks(rank: int, world: int, kind: str) -> None:
    """Hooks before and after states are taken and loaded; strict and lenient loads; prefixes."""
    module, other = made(kind), made(kind, seed=1)
    seen: list[str] = []
    module.register_state_dict_pre_hook(lambda *_: seen.append("before"))
    module.register_state_dict_post_hook(lambda _, state, prefix, __: state.update({f"{prefix}extra": torch.ones(1)}))

    def before(loads: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        seen.append("loads")
        state.pop(f"{prefix}extra")

    def after(loads: nn.Module, keys: Any) -> None:
        seen.append("loaded")
        keys.missing_keys.clear()

    handle = other.register_load_state_dict_pre_hook(before)
    other.register_load_state_dict_post_hook(after)
    state = nn.ModuleDict({"tables": module}).state_dict()
    assert all(name.startswith("tables.") for name in state)
    nn.ModuleDict({"tables": other}).load_state_dict(dict(state))
    assert seen == ["before", "loads", "loaded"]
    assert other.digest() == module.digest()
    partial = {name: one for name, one in module.state_dict().items() if not name.startswith("item")}
    assert not other.load_state_dict(partial).missing_keys  # The hook has cleared them.
    handle.remove()
    assert other.load_state_dict(module.state_dict(), strict=False).unexpected_keys == ["extra"]
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"extra"'):
        other.load_state_dict(module.state_dict())
    assert other.digest() == module.digest()
    fresh = made(kind, seed=1)
    found = fresh.load_state_dict({"user/0.0.weight": torch.zeros(5, 4)}, strict=False)
    assert "steps" in found.missing_keys
    assert "user/0.0.weight" not in found.missing_keys
    rows = [one["user"].get_rows(torch.arange(10)) for one in (fresh, made(kind, seed=1))]
    assert rows[0].equal(torch.cat([torch.zeros(5, 4), rows[1][5:]]))
    before = fresh.digest()
    with pytest.raises(RuntimeError, match="Missing key"):
        fresh.load_state_dict({})
    assert fresh.digest() == before
    assert fresh.load_state_dict(copy.deepcopy(dict(fresh.state_dict())), assign=True).missing_keys == []
    assert all(module.state_dict(keep_vars=True)[name] is not None for name in state if name == "steps")


def lenient_loads(rank: int, world: int) -> list[Any]:
    """States of other models: missing keys, updates of each table, rows, and states of optimizers."""

    def made(*tables: Table, steps: int = 0, lr: float = 0.5) -> ShardedEmbeddingBags:
        module = ShardedEmbeddingBags(tables, lr=lr)
        for _ in range(steps):
            torch.stack([one.sum() for one in module({"user": ids, "item": ids}).values()]).sum().backward()
        return module

    def whole(module: ShardedEmbeddingBags) -> dict[str, Any]:
        every: list[Any] = [None] * world
        own = {key: torch.clone(one) for key, one in module.state_dict().items()}
        torch.distributed.all_gather_object(every, own)
        return {key: one for of_rank in every for key, one in of_rank.items()}

    def outcome(module: ShardedEmbeddingBags, state: dict[str, Any]) -> list[Any]:
        keys = module.load_state_dict(state, strict=False)
        rows = {name: module[name].get_rows(torch.arange(10)) for name in module}
        here = {key: bool(one.any()) for key, one in module.state_dict().items() if key.endswith("moment1")}
        every: list[Any] = [None] * world
        torch.distributed.all_gather_object(every, (keys.missing_keys, here))
        assert all(missing == keys.missing_keys for missing, _ in every)
        has_moved = {key: moved for _, of_rank in every for key, moved in of_rank.items()}
        as_saved = {name: torch.equal(one, saved[name]) for name, one in rows.items() if name in saved}
        return [keys.missing_keys, keys.unexpected_keys, module.steps.tolist(), as_saved, sorted(has_moved.items())]

    def table(name: str, optimizer: str = "adam", **options: Any) -> Table:
        return Table(name=name, rows=10, dim=4, row_shards=2, optimizer=optimizer, **options)

    ids = torch.arange(1, 9).chunk(world)[rank]
    adam, sgd = made(table("user"), steps=3), made(table("user", "sgd"), steps=2)
    found = []
    for before, after in (
        (sgd, made(table("user"))),  # Rows without states.
        (sgd, made(table("user"), steps=1)),  # States are of other rows.
        (adam, made(table("item"), table("user"))),  # A new table, and `steps` without it.
        (adam, made(table("item", "sgd"), table("user", "sgd"))),
    ):
        saved = {"user": before["user"].get_rows(torch.arange(10))}
        found.append(outcome(after, whole(before)))
    saved = {"user": adam["user"].get_rows(torch.arange(10))}
    two = whole(adam) | {"steps": torch.tensor([7, 3])}
    found.append(outcome(made(table("item"), table("user")), two))
    found.append(outcome(made(table("item", "sgd"), table("user")), two))
    # A directory without states of the optimizer is of no use.
    dynamic = made(table("user", "sgd", ids="dynamic"), steps=2)
    saved = {}
    other = made(table("user", ids="dynamic"), steps=1)
    digest = other.digest()
    found.append(outcome(other, whole(dynamic)))
    assert other.digest() == digest
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "item/0.0.weight", .*"steps"'):
        made(table("user"), table("item")).load_state_dict(whole(adam))
    return found


class Model(nn.Module):
    def __init__(self, kind: str, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.tables, self.top = made(kind, seed=seed), nn.Linear(8, 2)

    def forward(self, ids: dict[str, Tensor]) -> Tensor:
        found: Tensor = self.top(torch.cat(list(self.tables(ids).values()), 1))
        return found


def dcp_states(rank: int, world: int, kind: str, with_ddp: bool) -> None:
    """test_strict, test_single_gpu, frozen parameters, flat optimizer states, host copies, of test_state_dict.py."""

    def trained(seed: int, steps: int) -> tuple[Any, Any, torch.optim.Optimizer]:
        inner = Model(kind, seed)
        called: Any = DistributedDataParallel(inner) if with_ddp else inner
        optimizer = torch.optim.Adam(called.parameters(), lr=0.1, foreach=False)
        for number in range(steps):
            optimizer.zero_grad()
            called(given(number)).square().sum().backward()
            optimizer.step()
        return called, inner, optimizer

    _, first, optimizer = trained(0, 2)
    own = f"tables.user/{rank}.0.weight"
    for options in (
        StateDictOptions(), StateDictOptions(cpu_offload=True), StateDictOptions(flatten_optimizer_state_dict=True),
        StateDictOptions(keep_submodule_prefixes=False),
    ):  # fmt: skip
        _, second, other = trained(1, 1)
        weights, states = get_state_dict(first, optimizer, options=options)
        assert own in weights
        set_state_dict(second, other, model_state_dict=weights, optim_state_dict=states, options=options)
        assert second.tables.digest() == first.tables.digest()
        assert torch.equal(second.top.weight, first.top.weight)
    weights = get_model_state_dict(first)
    assert weights.keys() == first.state_dict().keys()
    weights["abc"] = torch.zeros(10)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        set_model_state_dict(first, model_state_dict=weights)
    del weights[own]
    found = set_model_state_dict(first, model_state_dict=weights, options=StateDictOptions(strict=False))
    assert own in found.missing_keys
    assert found.unexpected_keys == ["abc"]
    del weights["abc"]
    with pytest.raises(RuntimeError, match="Missing key"):
        set_model_state_dict(first, model_state_dict=weights)
    first.top.requires_grad_(False)
    frozen = get_model_state_dict(first, options=StateDictOptions(ignore_frozen_params=True))
    assert own in frozen
    assert "top.weight" not in frozen
    assert any("handles" in name for name in get_optimizer_state_dict(first, optimizer)["state"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("check", [calls, converts, hooks, state_hooks])
def test_what_torchs_tests_of_modules_ask(kept_world: WorldFactory, check: Callable[..., None], kind: str) -> None:
    kept_world(2).run(check, kind=kind)


def test_backward_hooks_take_one_tensor(kept_world: WorldFactory) -> None:
    kept_world(2).run(backward_hooks)


def test_a_lenient_load_takes_what_is_there_and_names_the_rest_in_every_world(kept_world: WorldFactory) -> None:
    alone = kept_world(1).run(lenient_loads)[0]
    assert kept_world(2).run(lenient_loads) == [alone] * 2
    moments = [f"user/{row}.0.{state}" for row in range(2) for state in ("moment1", "moment2")]
    item = [f"item/{row}.0.{state}" for row in range(2) for state in ("weight", "moment1", "moment2")]
    fresh, moved = ([(f"user/{row}.0.moment1", has_moved) for row in range(2)] for has_moved in (False, True))
    of_item = [(f"item/{row}.0.moment1", False) for row in range(2)]
    assert alone[0] == [moments, [], [0], {"user": True}, fresh]
    assert alone[1] == [moments, [], [1], {"user": True}, fresh]
    assert alone[2] == [[*item, "steps"], [], [0, 0], {"user": True}, of_item + moved]
    assert alone[3][:4] == [["item/0.0.weight", "item/1.0.weight", "steps"], moments, [0, 0], {"user": True}]
    assert alone[4] == [item, [], [3, 3], {"user": True}, of_item + moved]
    assert alone[5][:3] == [["item/0.0.weight", "item/1.0.weight"], [], [0, 3]]


@pytest.mark.parametrize("with_ddp", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_what_torchs_tests_of_states_ask(kept_world: WorldFactory, kind: str, with_ddp: bool) -> None:
    kept_world(2).run(dcp_states, kind=kind, with_ddp=with_ddp)


def test_torchs_own_tests_of_modules(new_world: WorldFactory, tmp_path: Path) -> None:
    """TORCH_TESTS: the folder `test` of a clone of PyTorch. No package has it."""
    if "TORCH_TESTS" not in os.environ:
        pytest.skip("TORCH_TESTS does not name the folder `test` of a clone of PyTorch, which torch does not install")
    source = str(Path(os.environ["TORCH_TESTS"], "test_modules.py").resolve())
    outcomes, *_ = new_world(1, backend="").run(own_tests, folder=str(tmp_path), source=source)
    print(*(f"{name}: {outcome}" for name, outcome in outcomes.items()), sep="\n")
    assert sum(outcome == "passed" for outcome in outcomes.values()) >= LEAST_OF_TORCH
