# SPDX-License-Identifier: Apache-2.0
# Torch types its optimizers thinly:
# mypy: disable-error-code="arg-type,no-untyped-call,no-untyped-def"
"""torch's own inputs for optimizers and schedulers, given to tables, and the ways of its pages with a `GradScaler`.

torch's package has the inputs (`torch.testing._internal.common_optimizers`), but not the tests that take them. So what
these compute is here, for tables and for torch's optimizer side by side.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR

from sennit.runtime.kernels import OptimizerSpec
from sennit.runtime.sharded import ShardedEmbeddingBags, Table
from sennit.transport.errors import ArgumentError, ConfigError
from tests.runtime.sharded_training import rows_of
from tests.runtime.world import WorldFactory

pytestmark = pytest.mark.timeout(120)

ROWS, DIM = 10, 4
# torch's classes that tables have, by name. docs/reference/sharded.md says why not the others.
OURS = {"SGD": "sgd", "Adagrad": "adagrad", "Adam": "adam", "AdamW": "adamw", "SparseAdam": "adam"}
NOT_OURS = {
    "Adadelta", "Adafactor", "Adamax", "ASGD", "LBFGS", "Muon", "NAdam", "RAdam", "RMSprop", "Rprop",
}  # fmt: skip
# What torch would compute otherwise, in its classes that tables have.
WITHOUT_MEANING = {("SGD", "dampening"), ("Adam", "amsgrad"), ("AdamW", "amsgrad")}

Scheduler = Callable[[torch.optim.Optimizer], Any]


def module_of(spec: OptimizerSpec, lr: float) -> ShardedEmbeddingBags:
    def initial(rows: Tensor, generator: torch.Generator) -> None:
        rows.normal_(generator=generator)

    table = Table(name="user", rows=ROWS, dim=DIM, optimizer=spec, initial=initial)
    return ShardedEmbeddingBags([table], lr=lr, gradients="sum", slices=1)


def spec_like(name: str, theirs: torch.optim.Optimizer) -> OptimizerSpec:
    """The optimizer of tables with the options of one of torch."""
    found = theirs.defaults
    options = {"weight_decay": found.get("weight_decay", 0.0), "epsilon": found.get("eps", 0.0)}
    options |= {one: found[one] for one in ("momentum", "nesterov") if one in found}
    if "betas" in found:
        options["beta1"], options["beta2"] = found["betas"]
    return OptimizerSpec.named(OURS[name], **options)


class Decayed:
    """The factor of a rate that torch's Adagrad decays itself."""

    def __init__(self, decay: float) -> None:
        self._decay = decay

    def __call__(self, step: int) -> float:
        return 1 / (1 + step * self._decay)


def infos() -> Iterator[tuple[str, Any]]:
    """Name and torch's description of each of its optimizers that tables have."""
    from torch.testing._internal.common_optimizers import optim_db

    for info in optim_db:
        name = info.name
        assert name in OURS or name in NOT_OURS
        if name in OURS:
            yield name, info


def with_inputs_of_torch(rank: int, world: int) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Trains with each of torch's inputs. Returns class and description of those that were run, and of the others."""
    run, others = [], []
    generator = torch.Generator().manual_seed(3)
    for name, info in infos():
        for given in info.optim_inputs_func(device="cpu"):
            weight = nn.Parameter(torch.zeros(ROWS, DIM))
            theirs = info.optim_cls([weight], **given.kwargs)
            found = theirs.defaults
            if found.get("amsgrad") or found.get("dampening"):
                others.append((name, given.desc))
                continue
            module = module_of(spec_like(name, theirs), float(found["lr"]))
            weight.data.copy_(rows_of(module, world))
            if found.get("initial_accumulator_value"):
                module.state_dict()["user/0.0.sum"].fill_(found["initial_accumulator_value"])
            schedule = schedulers.LambdaLR(module.optimizer, Decayed(found.get("lr_decay", 0.0)))
            for _ in range(4):
                # torch's other optimizers move rows without lookups.
                count = ROWS // 2 if info.only_supports_sparse_grads else ROWS
                ids = torch.randperm(ROWS, generator=generator)[:count]
                gradient = torch.randn(count, DIM, generator=generator)
                theirs.zero_grad()
                rows = nn.functional.embedding(ids, weight, sparse=info.only_supports_sparse_grads)
                rows.backward(gradient)
                theirs.step()
                module({"user": ids})["user"].backward(-gradient if found.get("maximize") else gradient)
                module.optimizer.step()
                schedule.step()
            what = f"{name}: {given.desc}"
            torch.testing.assert_close(rows_of(module, world), weight.detach(), rtol=1e-4, atol=1e-5, msg=what)
            run.append((name, given.desc))
    return run, others


def test_tables_train_as_torch_with_its_own_inputs(kept_world: WorldFactory) -> None:
    ((run, others),) = kept_world(1).run(with_inputs_of_torch)
    assert set(others) == WITHOUT_MEANING
    assert {name for name, _ in run} == set(OURS)
    assert {("SGD", "nesterov"), ("Adagrad", "lr_decay"), ("AdamW", "maximize"), ("SparseAdam", "default")} <= set(run)


def refused_as_by_torch(rank: int, world: int) -> list[str]:
    """What torch refuses of values is refused here. Returns what was tried."""
    tried = []
    for name, info in infos():
        for wrong in info.optim_error_inputs_func("cpu", torch.float32):
            given = wrong.optimizer_error_input
            values = [*given.kwargs.get("betas", ()), given.kwargs.get("lr")]
            # Parameters are those of the tables, and tensors are for compiled steps.
            is_other = given.params is not None or any(isinstance(one, Tensor) for one in values)
            if is_other or not set(given.kwargs) <= {"betas", "weight_decay", "momentum", "lr"}:
                continue
            options = {key: value for key, value in given.kwargs.items() if key not in ("lr", "betas")}
            options |= dict(zip(("beta1", "beta2"), given.kwargs.get("betas", ()), strict=False))
            with pytest.raises(ConfigError, match="; allowed: "):
                OptimizerSpec.named(OURS[name], **options)
            tried.append(given.desc)
    return tried


def test_values_that_torch_refuses_are_refused(kept_world: WorldFactory) -> None:
    (tried,) = kept_world(1).run(refused_as_by_torch)
    assert {"beta1 should be between 0 and 1", "momentum should be between 0 and 1"} <= set(tried)
    assert "weight_decay should > 0" in tried


def with_schedulers_of_torch(rank: int, world: int) -> int:
    """The loss falls with each of torch's combinations of schedulers, with the rates of torch. Returns how many."""
    count = 0
    for name, info in infos():
        for makers in info.scheduler_inputs:
            weight = nn.Parameter(torch.zeros(ROWS, DIM))
            theirs = info.optim_cls([weight], lr=0.01)
            module = module_of(spec_like(name, theirs), 0.01)
            weight.data.copy_(rows_of(module, world))
            both = [(make(module.optimizer), make(theirs)) for make in makers]
            losses = []
            for _ in range(20):
                loss = module({"user": torch.arange(ROWS)})["user"].square().sum()
                loss.backward()
                module.optimizer.step()
                theirs.zero_grad()
                rows = nn.functional.embedding(torch.arange(ROWS), weight, sparse=info.only_supports_sparse_grads)
                rows.square().sum().backward()
                theirs.step()
                losses.append(loss.item())
                for one, other in both:
                    for scheduler in (one, other):
                        plateau = isinstance(scheduler, schedulers.ReduceLROnPlateau)
                        scheduler.step(*([losses[-1]] if plateau else []))
                assert module["user"].lr == theirs.param_groups[0]["lr"]
            torch.testing.assert_close(rows_of(module, world), weight.detach(), rtol=1e-4, atol=1e-5)
            assert losses[-1] < losses[0]
            count += 1
    return count


def test_tables_train_with_schedulers_as_torch_combines_them(kept_world: WorldFactory) -> None:
    (count,) = kept_world(1).run(with_schedulers_of_torch)
    assert count > 10


def combined(optimizer: torch.optim.Optimizer) -> Any:
    parts = [schedulers.ConstantLR(optimizer, factor=0.1), schedulers.ExponentialLR(optimizer, gamma=0.9)]
    return schedulers.SequentialLR(optimizer, parts, milestones=[4])


SCHEDULERS: dict[str, Scheduler] = {
    "LambdaLR": lambda one: schedulers.LambdaLR(one, lambda step: 0.9**step),
    "MultiplicativeLR": lambda one: schedulers.MultiplicativeLR(one, lambda step: 0.95),
    "StepLR": lambda one: schedulers.StepLR(one, 3, gamma=0.5),
    "MultiStepLR": lambda one: schedulers.MultiStepLR(one, [2, 7], gamma=0.5),
    "ConstantLR": lambda one: schedulers.ConstantLR(one, factor=0.5, total_iters=4),
    "LinearLR": lambda one: schedulers.LinearLR(one, total_iters=6),
    "ExponentialLR": lambda one: schedulers.ExponentialLR(one, gamma=0.9),
    "PolynomialLR": lambda one: schedulers.PolynomialLR(one, total_iters=10, power=2.0),
    "CosineAnnealingLR": lambda one: schedulers.CosineAnnealingLR(one, T_max=5, eta_min=1e-3),
    "CosineAnnealingWarmRestarts": lambda one: schedulers.CosineAnnealingWarmRestarts(one, T_0=3, T_mult=2),
    "SequentialLR": combined,
    "ChainedScheduler": lambda one: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(one, factor=0.1), schedulers.ExponentialLR(one, gamma=0.9)], optimizer=one
    ),
    "ReduceLROnPlateau": lambda one: schedulers.ReduceLROnPlateau(one, factor=0.5, patience=1, min_lr=[0.02, 1e-3]),
    "CyclicLR": lambda one: schedulers.CyclicLR(one, 0.01, 0.1, step_size_up=3, cycle_momentum=False),
    "OneCycleLR": lambda one: schedulers.OneCycleLR(one, max_lr=[0.2, 0.1], total_steps=20, cycle_momentum=False),
    "SWALR": lambda one: SWALR(one, swa_lr=0.03, anneal_epochs=5),
}
METRICS = (5.0, 4.0, 4.5, 4.5, 4.5, 3.0, 3.5, 3.5, 3.6, 3.7, 3.8, 3.9)


def two_tables() -> ShardedEmbeddingBags:
    options: dict[str, Any] = {"rows": 3, "dim": 2, "optimizer": OptimizerSpec.named("sgd")}
    return ShardedEmbeddingBags(
        [Table(name="user", **options), Table(name="item", lr=0.01, **options)], lr=0.1, gradients="sum", slices=1
    )


def scheduled(rank: int, world: int) -> None:
    """Each class of torch, on our optimizer and on torch's SGD: the same rates, also after a restart halfway."""
    ids = torch.zeros(1, dtype=torch.int64)
    for name, make in SCHEDULERS.items():
        module, weights = two_tables(), [nn.Parameter(torch.zeros(2)) for _ in range(2)]
        theirs = torch.optim.SGD([{"params": [one], "lr": lr} for one, lr in zip(weights, (0.1, 0.01), strict=True)])
        ours, other = make(module.optimizer), make(theirs)
        start = rows_of(module, world)[0]
        for step, metric in enumerate(METRICS):
            rates = [group["lr"] for group in module.optimizer.param_groups]
            assert rates == [group["lr"] for group in theirs.param_groups], (name, step)
            assert rates == [module["user"].lr, module["item"].lr]
            found = module({"user": ids, "item": ids})
            (found["user"].sum() + found["item"].sum()).backward()
            for one in weights:
                one.grad = torch.ones(2)
            module.optimizer.step()
            theirs.step()
            for scheduler in (ours, other):
                scheduler.step(*([metric] if name == "ReduceLROnPlateau" else []))
            if step == 5:
                module.check()
                moved = weights[0].detach() + start
                torch.testing.assert_close(rows_of(module, world)[0], moved, msg=name)
                states = ours.state_dict(), module.optimizer.state_dict()
                module = two_tables()
                ours = make(module.optimizer)
                module.optimizer.load_state_dict(states[1])
                ours.load_state_dict(states[0])


def rates_by_name(rank: int, world: int) -> None:
    """Rates follow their tables. What a group does not have is refused where it would have an effect."""

    def made(**rates: float) -> ShardedEmbeddingBags:
        return ShardedEmbeddingBags([Table(name=name, rows=4, dim=2, lr=rate) for name, rate in rates.items()], lr=1.0)

    module = made(item=0.3, user=0.4)
    module.optimizer.load_state_dict(made(user=0.1, item=0.2).optimizer.state_dict())
    assert (module["user"].lr, module["item"].lr) == (0.1, 0.2)
    with pytest.raises(ArgumentError, match="rates of the tables user; allowed: those of item, user"):
        module.optimizer.load_state_dict(made(user=0.1).optimizer.state_dict())
    module.optimizer.param_groups[1]["weight_decay"] = 0.1
    with pytest.raises(ArgumentError, match=r"table user: weight_decay in .*; allowed: Table"):
        module({"user": torch.arange(4), "item": torch.arange(4)})


def test_rates_are_loaded_by_name_and_other_settings_refused(kept_world: WorldFactory) -> None:
    kept_world(1).run(rates_by_name)


def test_any_scheduler_of_torch_sets_the_rates_of_tables(kept_world: WorldFactory) -> None:
    kept_world(1).run(scheduled)


def test_all_schedulers_of_torch_are_tried() -> None:
    found = {
        name
        for name, one in vars(schedulers).items()
        if inspect.isclass(one) and issubclass(one, schedulers.LRScheduler) and not name.startswith("_")
    }
    assert found - {"LRScheduler"} <= set(SCHEDULERS)


def without_momentum(rank: int, world: int) -> None:
    """A momentum belongs to the model. Schedulers that would change it say so, as for Adagrad of torch."""
    for optimizer in (two_tables().optimizer, torch.optim.Adagrad([nn.Parameter(torch.zeros(1))])):
        for make in (
            lambda one: schedulers.CyclicLR(one, 0.01, 0.1),
            lambda one: schedulers.OneCycleLR(one, max_lr=0.1, total_steps=10),
        ):
            with pytest.raises(ValueError, match="optimizer must support momentum"):
                make(optimizer)


def test_schedulers_do_not_cycle_the_momentum_of_tables(kept_world: WorldFactory) -> None:
    kept_world(1).run(without_momentum)


class Scaled:
    """A layer above a table of two ids a bag, their optimizers, and a scaler."""

    def __init__(self, layer: nn.Linear, table: Callable[[Tensor], Tensor], of_table: torch.optim.Optimizer) -> None:
        self.layer, self.table = layer, table
        nn.init.constant_(layer.weight, 0.5)
        self.optimizers = torch.optim.SGD(layer.parameters(), lr=0.1), of_table
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=2)

    def step(self, way: str, held: contextlib.AbstractContextManager[None], factor: float) -> bool:
        """One step of two backward passes, of which the first is `held`. Returns whether the scale fell."""
        first, second = (torch.arange(ROWS).view(-1, 2) % (5 + number) for number in range(2))
        if way == "two losses":
            out = self.layer(self.table(first)), self.layer(self.table(second))
            with held:
                self.scaler.scale((2 * out[0] + 3 * out[1]).square().mean()).backward(retain_graph=True)
            self.scaler.scale((3 * out[0] - 5 * out[1]).square().mean() * factor).backward()
        else:
            with held:
                self.scaler.scale(self.layer(self.table(first)).square().mean() / 2).backward()
            self.scaler.scale(self.layer(self.table(second)).square().mean() / 2 * factor).backward()
        for optimizer in self.optimizers:
            if way == "unscaled":
                self.scaler.unscale_(optimizer)
        if way == "unscaled":
            nn.utils.clip_grad_norm_(self.layer.parameters(), 0.1)
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        before = self.scaler.get_scale()
        self.scaler.update()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        return self.scaler.get_scale() < before


def scaled(rank: int, world: int, way: str) -> None:
    """Ways of torch's page on automatic mixed precision that make several backward passes for one step."""
    module = module_of(OptimizerSpec.named("sgd", momentum=0.5), 0.1)
    weight = nn.Parameter(rows_of(module, world))
    reference = torch.optim.SGD([weight], lr=0.1, momentum=0.5)
    theirs = Scaled(
        nn.Linear(DIM, 1, bias=False), lambda ids: nn.functional.embedding_bag(ids, weight, mode="sum"), reference
    )
    ours = Scaled(nn.Linear(DIM, 1, bias=False), lambda ids: module({"user": ids})["user"], module.optimizer)
    module.optimizer.scaler = ours.scaler
    for step in range(5):
        factor = torch.inf if step == 2 else 1.0
        fell = theirs.step(way, contextlib.nullcontext(), factor)
        assert ours.step(way, module.no_sync(), factor) == fell == (step == 2)
        torch.testing.assert_close(rows_of(module, world), weight.detach(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(ours.layer.weight, theirs.layer.weight, rtol=1e-4, atol=1e-5)
        assert ours.scaler.get_scale() == theirs.scaler.get_scale()


@pytest.mark.parametrize("way", ["accumulation", "two losses", "unscaled"])
def test_a_grad_scaler_goes_the_ways_of_its_page(kept_world: WorldFactory, way: str) -> None:
    kept_world(1).run(scaled, way=way)
