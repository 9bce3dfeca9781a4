# SPDX-License-Identifier: Apache-2.0
# Torch types its collectives thinly:
# mypy: disable-error-code="no-untyped-call,arg-type"
"""A whole model on sharded tables: one digest of all weights, whatever the run looked like."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from sennit.runtime.kernels import Optimizer, OptimizerSpec, Pooling, Precision
from sennit.runtime.model import ModelInputs, build
from sennit.runtime.replicas import SlicedReplicas
from sennit.runtime.sharded import (
    Features,
    IdError,
    PeerInputError,
    ShardedEmbeddingBags,
    ShardedEmbeddings,
    Table,
    TableStore,
)
from sennit.transport.errors import ArgumentError, ConfigError, Unsupported
from tests.extent import briefly
from tests.runtime.sharded_model import SAMPLES, Run, trained
from tests.runtime.sharded_training import rows_of
from tests.runtime.world import WorldFactory

pytestmark = pytest.mark.timeout(180)


def saved(rank: int, world: int, placement: Any, folder: str) -> str:
    """Three steps, then a checkpoint."""
    run = Run(rank, placement)
    for number in range(3):
        run.step(number)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state_dict_saver.save(run.state(), checkpoint_id=Path(folder))
    return run.digest()


def resumed(rank: int, world: int, placement: Any, folder: str) -> str:
    """Goes on from the checkpoint to five steps."""
    run = Run(rank, placement)
    run.step(0)  # Makes the optimizer's state, and leaves weights that the checkpoint has to replace.
    state = run.state()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state_dict_loader.load(state, checkpoint_id=Path(folder))
    run.restore(state)
    for number in (3, 4):
        run.step(number)
    return run.digest()


def refuses_other_shards(rank: int, world: int) -> None:
    table = Table(name="user", rows=10, dim=4, row_shards=2)
    state = ShardedEmbeddingBags([table], lr=1).state_dict()
    other = ShardedEmbeddingBags([Table(name="user", rows=12, dim=4, row_shards=2)], lr=1)
    assert any("weight" in key for key in state) == (rank == 0)  # One shard table-wise: all on rank 0.
    # All ranks raise, and rank 0 says why: it holds the shard.
    why = r"of \(6, 4\): were its tables cut into other shards" if rank == 0 else r"Missing key.*user/0.0.weight"
    with pytest.raises(RuntimeError, match=why):
        other.load_state_dict(state)
    foreign = ShardedEmbeddingBags([Table(name="item", rows=10, dim=4)], lr=1)
    unexpected = r".*\n.*Unexpected key.*user/0.0" if rank == 0 else ""
    with pytest.raises(RuntimeError, match=r"Missing key.*item/0.0.weight" + unexpected):
        foreign.load_state_dict(state)


def beside_ddp(rank: int, world: int) -> None:
    """DDP around the whole model leaves tables alone, and averages what it wraps: as plain torch on the whole batch."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.tables = ShardedEmbeddingBags(
                [Table(name="user", rows=20, dim=4, optimizer=OptimizerSpec(kind=Optimizer.SGD))], lr=0.1
            )
            self.top = nn.Linear(4, 1)

        def forward(self, ids: Tensor) -> Tensor:
            found: Tensor = self.top(self.tables({"user": ids})["user"])
            return found

    ids = torch.arange(16) % 20
    own = ids[8 * rank : 8 * rank + 8] if world == 2 else ids
    model = DistributedDataParallel(Model())
    assert [name for name, _ in model.named_parameters()] == [
        "module.tables.handles.user", "module.top.weight", "module.top.bias",
    ]  # fmt: skip
    model(own).square().mean().backward()
    alone = Model().top
    weight = torch.empty(20, 4)
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, {held.name: held.weight for held in model.module.tables.held()})
    fresh = Model().tables
    fresh_of: list[Any] = [None] * world
    dist.all_gather_object(fresh_of, {held.name: held.weight for held in fresh.held()})
    weight = nn.Parameter(next(part["user/0.0"] for part in fresh_of if part))
    alone(functional.embedding_bag(ids.view(-1, 1), weight)).square().mean().backward()
    for ours, theirs in zip(model.module.top.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    assert weight.grad is not None
    updated = next(part["user/0.0"] for part in everyone if part)
    torch.testing.assert_close(updated, weight.detach() - 0.1 * weight.grad)


class Simple(nn.Module):
    """A layer on bags and on a sequence."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        sgd = OptimizerSpec(kind=Optimizer.SGD)
        self.bags = ShardedEmbeddingBags([Table(name="user", rows=20, dim=4, optimizer=sgd)], lr=0.1)
        self.rows = ShardedEmbeddings([Table(name="item", rows=9, dim=4, pooling=Pooling.NONE)], lr=0.1)
        self.top = nn.Linear(8, 2)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        vectors = torch.cat([self.bags({"user": users})["user"], self.rows({"item": items})["item"]], 1)
        found: Tensor = self.top(vectors).relu()
        return found


def compiled_or_sharded(rank: int, world: int, how: str) -> str:
    """Three steps of a model that is compiled, or whose dense part FSDP2 shards, end as those of DDP."""
    digests = []
    for changed in (False, True):
        model: Any = Simple()
        tables = (model.bags, model.rows)
        if changed and how == "fsdp2":
            fully_shard(model)
        else:
            model = DistributedDataParallel(model)
        called = torch.compile(model, backend="aot_eager") if changed and how == "compile" else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(3):
            ids = torch.arange(8) + 8 * rank + number
            with warnings.catch_warnings():
                # Dynamo looks at the gradients of what goes into a graph, which are no leaves.
                warnings.filterwarnings("ignore", message="The .grad attribute", category=UserWarning)
                loss = called(ids % 20, ids % 9).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        for part in tables:
            part.check()
        digests.append(" ".join(part.digest() for part in tables))
    assert digests[0] == digests[1]
    return digests[0]


def trained_by_name(rank: int, world: int, name: str, placement: str) -> str:
    """Three steps of a model of `sennit train`, on uneven slices."""
    torch.set_num_threads(1)
    tables = [
        Table(name="user", rows=300, dim=8, row_shards=4),
        Table(name="item", rows=40, dim=8, row_shards=4, pooling=Pooling.MEAN),
    ]
    inputs = ModelInputs(dense_count=3, tables=tuple(tables), bottom=(6,), top=(10, 5))
    embeddings = ShardedEmbeddingBags(tables, lr=0.05, gradients="sum", placement=placement)
    replicas = SlicedReplicas(build(name, inputs))
    optimizer = torch.optim.Adam(replicas.parameters(), lr=0.01, foreach=False)
    first = replicas.digest()
    for number in range(3):
        generator = torch.Generator().manual_seed(number)
        dense = torch.randn(SAMPLES, 3, generator=generator)
        labels = torch.randint(0, 2, (SAMPLES,), generator=generator).to(torch.float32)
        ids = {
            table.name: (torch.rand(SAMPLES, 3, generator=generator) * table.rows).to(torch.int64) for table in tables
        }
        own = embeddings.slices.own_samples(SAMPLES)
        vectors = embeddings({feature: all_ids[own] for feature, all_ids in ids.items()}, global_batch=SAMPLES)
        logits = replicas(dense[own], vectors, global_batch=SAMPLES)
        losses = replicas.each_slice(
            functional.binary_cross_entropy_with_logits, logits, labels[own], reduction="sum", global_batch=SAMPLES
        )
        optimizer.zero_grad()
        replicas.loss(losses, SAMPLES).backward()
        optimizer.step()
    embeddings.check()
    assert replicas.digest() != first
    return f"{embeddings.digest()} {replicas.digest()}"


def moves_as_told(rank: int, world: int, placement: str, kind: str) -> None:
    """Tables of one engine: each has the bits that a module of its rate gives it, or those that it began with."""
    is_bags = kind == "bags"

    def module_of(**lr: float) -> Any:
        tables = [
            Table(
                name=name, rows=12, dim=4, row_shards=2, precision=Precision.FP16, lr=lr.get(name),
                optimizer=OptimizerSpec(kind=Optimizer.ADAM), pooling=Pooling.SUM if is_bags else Pooling.NONE,
            )
            for name in "abcd"
        ]  # fmt: skip
        made = ShardedEmbeddingBags if is_bags else ShardedEmbeddings
        return made(tables, lr=0.1, gradients="sum", placement=placement)

    slow, fast, mixed = module_of(), module_of(a=0.5, b=0.5, c=0.5, d=0.5), module_of(b=0.5, d=0)
    first = copy.deepcopy(mixed.state_dict())
    mixed["c"].frozen = True
    for module in (slow, fast, mixed):
        for step in range(3):
            ids = torch.arange(8) + step + rank
            found = module({name: ids for name in "abcd"})
            torch.stack(list(found.values())).square().sum().backward()
        module.check()
    expected = {"a": slow.state_dict(), "b": fast.state_dict(), "c": first, "d": first, "s": slow.state_dict()}
    state = mixed.state_dict()
    assert state.keys() == first.keys()
    for name, tensor in state.items():
        assert torch.equal(tensor, expected[name[0]][name]), name
    torch.optim.lr_scheduler.LambdaLR(mixed.optimizer, lambda _: 0.5)
    assert [mixed[name].lr for name in "abcd"] == [0.05, 0.25, 0.05, 0]
    assert repr(mixed["b"]) == "<table b: 12 rows of 4, lr 0.25>"


def freezes_all(rank: int, world: int) -> None:
    """Frozen tables are as torch's: no gradients travel, but for weights that require them."""
    tables = [Table(name=name, rows=10, dim=4, row_shards=2) for name in ("user", "item")]
    module = ShardedEmbeddingBags(tables, lr=0.1, placement="row_wise")
    before, ids = module.digest(), torch.arange(8)
    assert module.requires_grad_(False) is module
    assert module["user"].frozen
    assert not module({"user": ids, "item": ids})["item"].requires_grad
    assert "gradients" not in module.sent_bytes
    weights = torch.ones(16, requires_grad=True)
    lengths = torch.ones(2, 8, dtype=torch.int32)
    module(Features(lengths=lengths, values=ids.repeat(2), weights=weights))["user"].sum().backward()
    assert weights.grad is not None
    assert weights.grad[:8].all()
    assert module.digest() == before
    nn.Sequential(module).requires_grad_().eval()
    module({"user": ids, "item": ids})["item"].sum().backward()
    assert module.digest() != before


def names_tables(rank: int, world: int, how: str) -> None:
    """What a program does with parameters does nothing to those of tables: norms and steps are those of the rest."""
    left: list[list[Tensor]] = []
    for with_handles in (False, True):
        model: Any = Simple()
        names = [name for name, _ in model.named_parameters()]
        assert names == ["bags.handles.user", "rows.handles.item", "top.weight", "top.bias"]
        assert all("handles" not in name for name in model.state_dict())
        parts = model.bags, model.rows
        if how == "ddp":
            model = DistributedDataParallel(model, static_graph=with_handles)
        elif how == "fsdp2":
            fully_shard(model)
        trained = [value for name, value in model.named_parameters() if with_handles or "handles" not in name]
        optimizer = torch.optim.AdamW(trained, lr=0.1, weight_decay=0.5, foreach=False)
        norms = []
        for number in range(3):
            ids = torch.arange(8) + 8 * rank + number
            loss = model(ids % 20, ids % 9).square().mean()
            optimizer.zero_grad()
            loss.backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
            optimizer.step()
        stand_ins = [value for name, value in model.named_parameters() if "handles" in name]
        assert all(not value.any() for value in map(whole, stand_ins))
        others = [value for name, value in model.named_parameters() if "handles" not in name]
        left.append([*map(whole, norms), *map(whole, others)])
        for part in parts:
            part.check()
        digests = [part.digest() for part in parts]
        if how != "fsdp2":
            model.requires_grad_(False)
            assert all(part.optimizer.are_frozen for part in parts)
            model(ids % 20, ids % 9)
            assert [part.digest() for part in parts] == digests
    assert all(map(torch.equal, *left))


def whole(tensor: Any) -> Tensor:
    found: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found.detach()


def refuses_initial(rank: int, world: int) -> None:
    """Functions whose rows would depend on the placement, or on what was in memory before."""
    drawn = torch.randn(10, 4)

    def made(initial: Any) -> ShardedEmbeddingBags:
        return ShardedEmbeddingBags([Table(name="user", rows=10, dim=4, initial=initial)], lr=0.1)

    for initial, words in (
        (lambda rows, _: nn.init.normal_(rows), "initial draws from another generator than the one it is given"),
        (lambda rows, _: rows.copy_(torch.tensor(np.random.rand(*rows.shape))), "initial draws from another"),
        (lambda rows, generator: torch.randn(rows.shape, generator=generator), "initial left rows unfilled"),
        (lambda rows, _: rows[1:].zero_(), "initial left rows unfilled"),
    ):
        with pytest.raises(ConfigError, match=f"table user: {words}"):
            made(initial)
    state = torch.get_rng_state()
    for initial in (lambda rows, _: rows.copy_(drawn), lambda rows, generator: rows.normal_(generator=generator)):
        assert made(initial).digest()
    assert state.equal(torch.get_rng_state())


def test_initial_rows_are_filled_in_place_by_their_generator(kept_world: WorldFactory) -> None:
    kept_world(1).run(refuses_initial)


def disagrees(rank: int, world: int) -> None:
    """What ranks set differently is an error on all of them in the next call, whatever it is. Nothing changes."""
    for options, what in (
        ({"lr": 0.1 * (1 + rank)}, "lr: rank 0 has 0.1, rank 1 has 0.2"),
        ({"initial": nn.init.zeros_ if rank else nn.init.ones_}, "initial: rank 0 has first rows of digest"),
        ({"initial": nn.init.zeros_ if rank else None}, "initial: rank 0 has uniform, rank 1 has first rows"),
    ):
        initial = options.get("initial")
        table = Table(name="user", rows=10, dim=4, initial=initial and (lambda rows, _, fill=initial: fill(rows)))
        with pytest.raises(ConfigError, match=what):
            ShardedEmbeddingBags([table], lr=options.get("lr", 0.1))
    module = ShardedEmbeddingBags([Table(name="user", rows=10, dim=4)], lr=0.1)
    user, before, ids = module["user"], module.digest(), {"user": torch.arange(8)}
    calls: tuple[Callable[[], object], ...] = (
        lambda: module(ids), module.check, lambda: module.send(ids), lambda: user.get_rows(ids["user"]),
    )  # fmt: skip
    user.lr *= 1 + rank
    for call in calls:
        with pytest.raises(ConfigError, match=r"table user: rank 0 has lr 0\.1, rank 1 has lr 0\.2; all ranks must"):
            call()
    user.lr, user.frozen = 0.1, rank == 1
    for call in calls:
        with pytest.raises(ConfigError, match=r"table user: rank 0 has lr 0\.1, rank 1 has frozen; all ranks must"):
            call()
    user.frozen = False
    for wrong in (float("nan"), -0.1):
        # As a scheduler on a metric of its own may do.
        module.optimizer.param_groups[0]["lr"] = wrong if rank else 0.1
        text = f"table user: lr {wrong}; allowed: 0 or more"
        expected, words = (ConfigError, text) if rank else (PeerInputError, "of rank 1")
        with pytest.raises(expected, match=words):
            module(ids)
    user.lr = 0.1
    with pytest.raises(
        ConfigError, match=r"call: rank 0 has get_rows of table user, rank 1 has set_rows of table user"
    ):
        user.set_rows(ids["user"], torch.zeros(8, 4)) if rank else user.get_rows(ids["user"])
    assert module.digest() == before
    module(ids)["user"].sum().backward()
    assert module.digest() != before


def rows_by_id(rank: int, world: int, placement: str, folder: str | None) -> None:
    """Rows of any rank, read and set on any rank."""
    table = Table(name="user", rows=60, dim=6, row_shards=5, column_shards=2, precision=Precision.BF16)
    store = None if folder is None else TableStore(folder=Path(folder), memory_bytes=200_000)
    module = ShardedEmbeddingBags([table, Table(name="item", rows=9, dim=4)], lr=1, placement=placement, store=store)
    user, whole = module["user"], rows_of(module, world)
    assert (user.name, user.rows, user.dim, user.lr, user.frozen) == ("user", 60, 6, 1, False)
    ids = torch.randint(60, (40,), generator=torch.Generator().manual_seed(rank))
    assert torch.equal(user.get_rows(ids), whole[ids])
    assert user.get_rows(ids[: 10 * rank]).shape == (10 * rank, 6)
    own_ids = torch.arange(24)[module.slices.own_samples(24)] % 9
    module({"user": own_ids, "item": own_ids}, global_batch=24)["user"].sum().backward()
    states = {name: tensor.clone() for name, tensor in module.state_dict().items() if name.endswith("sum")}
    module.track_changes()
    whole = rows_of(module, world)
    # Each rank sets rows of its own, and row 7 is of the last one.
    values = (torch.arange(7 * 6.0).view(7, 6) + 100 * rank).to(torch.float64)
    own = [torch.cat([torch.arange(10 + 6 * one, 16 + 6 * one), torch.tensor([7])]) for one in range(world)]
    user.set_rows(own[rank].to(torch.int32), values)
    for one in range(world):
        whole[own[one]] = (torch.arange(7 * 6.0).view(7, 6) + 100 * one).to(torch.bfloat16).to(torch.float32)
    assert torch.equal(rows_of(module, world), whole)
    assert torch.equal(user.get_rows(ids), whole[ids])
    assert all(torch.equal(tensor, states[name]) for name, tensor in module.state_dict().items() if name in states)
    changed = {name: len(rows) for name, rows in module.changed_rows().items() if name.startswith("user/")}
    assert placement != "data_parallel" or sum(changed.values()) == 2 * (1 + 6 * world)
    for wrong, words in (
        (torch.tensor([3, 60]), "id 60; table user has rows 0 to 59"),
        (torch.tensor([3.0]), r"ids are torch.float32 of shape \(1,\); allowed: int32 or int64, one dimension"),
        (torch.tensor([3, 3]), "id 3 is given twice; allowed: once"),
        (torch.tensor([3]), r"values are torch.float32 of shape \(2, 6\); allowed: floats of \(1, 6\)"),
    ):
        good = torch.tensor([1, 2])
        with pytest.raises(ArgumentError) as caught:
            user.set_rows(wrong if rank == world - 1 else good, torch.zeros(2, 6))
        if rank == world - 1:
            caught.match(words)
            assert isinstance(caught.value, IdError) == ("60" in words)
        else:
            assert isinstance(caught.value, PeerInputError)
    with pytest.raises(KeyError, match="table 'users'; allowed: user, item"):
        module["users"]
    with pytest.raises(ConfigError, match="table user: lr -1; allowed: 0 or more"):
        user.lr = -1
    assert torch.equal(rows_of(module, world), whole)
    module.close()


def refuses_copies(rank: int, world: int) -> None:
    """What would keep one rank's rows alone names what keeps all."""
    module = ShardedEmbeddingBags([Table(name="user", rows=10, dim=4, row_shards=2)], lr=1, placement="row_wise")
    model = nn.Sequential(module)
    state = model.state_dict()
    copied = copy.deepcopy(state)
    assert torch.equal(copied[f"0.user/{rank}.0.weight"], state[f"0.user/{rank}.0.weight"])
    refused: tuple[Callable[[], object], ...] = (
        lambda: copy.deepcopy(model), lambda: copy.copy(module), lambda: pickle.dumps(model),
        lambda: AveragedModel(model), lambda: torch.save(model, io.BytesIO()), lambda: torch.save(state, io.BytesIO()),
        lambda: torch.save({"model": copied}, io.BytesIO()),
    )  # fmt: skip
    for call in refused:
        with pytest.raises(
            Unsupported, match=r"each rank has some of the rows; save .* by torch.distributed.checkpoint"
        ):
            call()
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    assert bool(full) == (rank == 0)
    if full:
        with pytest.raises(Unsupported, match=r"torch\.save of sharded tables: each rank has some of the rows"):
            torch.save(full, io.BytesIO())
    assert not hasattr(module, "user")
    assert model.get_parameter("0.handles.user").shape == (1,)
    for call, words in (
        (model.half, "are not cast to torch.float16; use Table.precision"),
        (lambda: model.to("meta"), "are not moved to meta; use device="),
    ):
        with pytest.raises(Unsupported, match=words):
            call()
    assert model.to("cpu").float() is model


def by_dcp(rank: int, world: int, how: str, folder: str) -> None:
    """A model goes on exactly from what torch's functions for states of models and optimizers have saved."""

    def made() -> tuple[Any, Any, torch.optim.Optimizer]:
        inner = Simple()
        if how == "fsdp2":
            fully_shard(inner)
        called = DistributedDataParallel(inner) if how == "ddp" else inner
        return called, inner, torch.optim.Adam(called.parameters(), lr=0.1, foreach=False)

    def named(states: tuple[Any, Any]) -> dict[str, Any]:
        return {"model": states[0], "optimizer": states[1]}

    def train(model: Any, optimizer: torch.optim.Optimizer) -> None:
        for number in range(2):
            optimizer.zero_grad()
            ids = torch.arange(8) + 8 * rank + number
            model(ids % 20, ids % 9).square().mean().backward()
            optimizer.step()

    first, second = made(), made()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(first[0], first[2])
        state_dict_saver.save(named(get_state_dict(first[1], first[2])), checkpoint_id=Path(folder))
        state = named(get_state_dict(second[1], second[2]))
        state_dict_loader.load(state, checkpoint_id=Path(folder))
        set_state_dict(second[1], second[2], model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        digests = []
        for model, inner, optimizer in (first, second):
            train(model, optimizer)
            digests.append([part.digest() for part in (inner.bags, inner.rows)])
    assert digests[0] == digests[1]
    assert all(map(torch.equal, map(whole, first[0].parameters()), map(whole, second[0].parameters())))


def saves_alone(rank: int, world: int) -> None:
    """A single rank has all rows, so torch may save them."""
    tables = [Table(name="user", rows=10, dim=4, row_shards=2)]
    module, other = (ShardedEmbeddingBags(tables, lr=1, seed=seed) for seed in (0, 1))
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file))
    assert other.digest() == module.digest()


SHARDINGS = ("table_wise", "row_wise", "column_wise", "grid", "data_parallel")


@pytest.fixture(scope="module")
def alone(kept_world: WorldFactory) -> str:
    """The digest of one rank's run."""
    found: str = kept_world(1).run(trained, placement="table_wise")[0]
    return found


@pytest.mark.parametrize("placement", SHARDINGS)
@pytest.mark.parametrize(
    ("world", "transport"),
    briefly([(1, "shm"), (2, "shm"), (2, "udp"), (3, "shm"), (3, "udp"), (4, "shm")], [(3, "shm")]),
)
def test_a_model_has_the_same_bits_in_every_world(
    kept_world: WorldFactory, alone: str, world: int, transport: str, placement: str
) -> None:
    assert set(kept_world(world, transport).run(trained, placement=placement)) == {alone}


def test_eight_ranks_have_the_same_bits(kept_world: WorldFactory, alone: str) -> None:
    assert set(kept_world(8).run(trained, placement="row_wise")) == {alone}


@pytest.mark.parametrize(("world", "placement"), [(1, "table_wise"), (2, "column_wise"), (3, "row_wise")])
def test_a_checkpoint_goes_on_in_any_world_and_placement(
    kept_world: WorldFactory, alone: str, tmp_path: Path, world: int, placement: str
) -> None:
    kept_world(2).run(saved, placement="row_wise", folder=str(tmp_path))
    found = kept_world(world).run(resumed, placement=placement, folder=str(tmp_path))
    assert set(found) == {alone}


def test_a_checkpoint_of_other_shards_is_refused(kept_world: WorldFactory) -> None:
    kept_world(2).run(refuses_other_shards)


def test_ddp_leaves_tables_alone(kept_world: WorldFactory) -> None:
    kept_world(2).run(beside_ddp)


@pytest.mark.parametrize("how", ["compile", "fsdp2"])
def test_a_model_with_tables_can_be_compiled_and_sharded_by_fsdp2(kept_world: WorldFactory, how: str) -> None:
    found = kept_world(2).run(compiled_or_sharded, how=how)
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["dlrm", "dcnv2", "deepfm"])
def test_models_of_the_trainer_have_the_same_bits_in_every_world(kept_world: WorldFactory, name: str) -> None:
    found = {
        digest
        for world, placement in ((1, "table_wise"), (2, "row_wise"), (3, "row_wise"), (3, "table_wise"))
        for digest in kept_world(world).run(trained_by_name, name=name, placement=placement)
    }
    assert len(found) == 1


@pytest.mark.parametrize("kind", ["bags", "sequences"])
@pytest.mark.parametrize("placement", ["row_wise", "data_parallel"])
def test_tables_have_rates_of_their_own_and_frozen_ones_do_not_move(
    kept_world: WorldFactory, placement: str, kind: str
) -> None:
    kept_world(2).run(moves_as_told, placement=placement, kind=kind)


def test_a_frozen_module_sends_no_gradients(kept_world: WorldFactory) -> None:
    kept_world(2).run(freezes_all)


def test_settings_that_differ_by_rank_are_errors_in_the_next_call(kept_world: WorldFactory) -> None:
    kept_world(2).run(disagrees)


@pytest.mark.parametrize(("world", "placement"), [(1, "table_wise"), (2, "data_parallel"), (3, "grid")])
def test_rows_are_read_and_set_by_id(kept_world: WorldFactory, world: int, placement: str) -> None:
    kept_world(world).run(rows_by_id, placement=placement, folder=None)


def test_rows_in_files_are_read_and_set_by_id(kept_world: WorldFactory, tmp_path: Path) -> None:
    kept_world(2).run(rows_by_id, placement="row_wise", folder=str(tmp_path))


def test_copies_of_one_ranks_rows_are_refused(kept_world: WorldFactory) -> None:
    kept_world(2).run(refuses_copies)


def test_one_rank_saves_its_state_by_torch(kept_world: WorldFactory) -> None:
    kept_world(1).run(saves_alone)


@pytest.mark.parametrize("lr", [-1, float("nan")])
def test_rates_are_0_or_more(lr: float) -> None:
    with pytest.raises(ConfigError, match=f"table user: lr {lr}; allowed: 0 or more, or None"):
        Table(name="user", rows=10, dim=4, lr=lr)


@pytest.mark.parametrize("how", ["alone", "ddp", "fsdp2"])
def test_parameters_that_stand_for_tables_change_nothing(kept_world: WorldFactory, how: str) -> None:
    kept_world(2).run(names_tables, how=how)


@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_torchs_functions_for_states_save_tables_too(kept_world: WorldFactory, how: str, tmp_path: Path) -> None:
    kept_world(2).run(by_dcp, how=how, folder=str(tmp_path))
