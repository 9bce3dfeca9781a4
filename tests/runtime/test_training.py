# SPDX-License-Identifier: Apache-2.0
"""Training with ranks: close to a plain torch loop, repeatable bit for bit, and resumed from checkpoints."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from sennit.runtime.checkpoint import folder as checkpoint

CASES = "training_cases.py"


def load_cases() -> ModuleType:
    spec = importlib.util.spec_from_file_location("training_cases", Path(__file__).with_name(CASES))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


cases = load_cases()
SHARDED = "[defaults]\nrow_shards = 4\ncolumn_shards = 2\n"


@pytest.fixture(params=["sennit-1", "sennit-2", "gloo-2"])
def world(request: pytest.FixtureRequest, kept_world: Any, new_world: Any) -> Any:
    """A world of each kind. Other tests share the worlds over sennit."""
    backend, size = request.param.split("-")
    return kept_world(int(size)) if backend == "sennit" else new_world(int(size), backend=backend)


def reference(seed: int, steps: int, *, is_bounded: bool) -> dict[str, torch.Tensor]:
    """Trains the same model in one process: autograd lookups as in `nn.EmbeddingBag`, dense gradients, no exchange.

    `is_bounded`: with all of `BOUNDED`.
    """
    from sennit.runtime.data.batch_source import prepared
    from sennit.runtime.model.factory import build
    from sennit.runtime.model.inputs import ModelInputs
    from sennit.runtime.sharded.initial import fill
    from sennit.runtime.sharded.tables import Shard, Table

    data = prepared(cases.samples(seed), cases.config_of(seed).order_settings)
    whole = data.samples
    batch_size, dim = cases.SMALL["batch_size"], cases.SMALL["embedding_dim"]
    step_count = data.order.step_count
    inputs = tuple(Table(name=column.name, rows=column.row_count, dim=dim) for column in whole.columns)
    model = build("dlrm", ModelInputs(dense_count=3, tables=inputs, bottom=(8,), top=(8,), seed=seed))
    tables = {}
    for table in inputs:
        weight = torch.empty(table.rows, dim)
        fill(weight, [table], Shard(0, 0, 0), seed=seed)
        tables[table.name] = weight.requires_grad_()
    state = {name: torch.zeros(len(weight)) for name, weight in tables.items()}
    dense_state = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for step in range(steps):
        rows = data.order.rows(step)
        factor = 1 - step / step_count
        if is_bounded:
            factor = (step + 1) / 3 if step < 3 else ((step_count - step) / (step_count - 3)) ** 2
        vectors, touched = {}, {}
        for column in whole.columns:
            lengths, ids = column.gather(rows)
            bags = torch.repeat_interleave(torch.arange(batch_size), lengths.long())
            vectors[column.name] = torch.zeros(batch_size, dim).index_add(0, bags, tables[column.name][ids])
            touched[column.name] = torch.tensor(sorted(set(ids.tolist())))
        loss = F.binary_cross_entropy_with_logits(model(whole.dense[rows], vectors), whole.labels[rows])
        parameters = list(model.parameters())
        gradients = torch.autograd.grad(loss, [*parameters, *tables.values()])
        dense, sparse = gradients[: len(parameters)], gradients[len(parameters) :]
        if is_bounded:
            dense = bounded(dense, parameters, by_row=False)
            sparse = bounded(sparse, list(tables.values()), by_row=True)
        with torch.no_grad():
            for parameter, total, gradient in zip(parameters, dense_state, dense, strict=True):
                total += gradient.square()
                parameter.sub_(0.02 * factor * gradient / (total.sqrt() + 1e-8))
            for (name, weight), gradient in zip(tables.items(), sparse, strict=True):
                part = touched[name]
                state[name][part] += gradient[part].square().mean(1)
                weight[part] -= 0.15 * factor * gradient[part] / (state[name][part].sqrt() + 1e-8)[:, None]
    named = {f"dense.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    return {**named, **{f"tables.{name}/0.0.weight": weight.detach() for name, weight in tables.items()}}


BOUNDED = {"decay": "polynomial", "warmup": 3, "clip_value": 0.001, "clip_norm": 0.0015, "weight_decay": 0.01}


def bounded(
    gradients: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], *, by_row: bool
) -> tuple[torch.Tensor, ...]:
    """Clips by value, then by the norm of each row or of all rows together. Weight decay is added after that."""
    clipped = [gradient.clamp(-0.001, 0.001) for gradient in gradients]
    whole = torch.cat([gradient.flatten() for gradient in clipped]).norm()
    norms = [gradient.norm(dim=1, keepdim=True) if by_row else whole for gradient in clipped]
    assert any(bool((norm > 0.0015).any()) for norm in norms)
    return tuple(
        gradient * (0.0015 / norm).clamp(max=1) + 0.01 * weight.detach()
        for gradient, norm, weight in zip(clipped, norms, weights, strict=True)
    )


@pytest.mark.parametrize("is_bounded", [False, True], ids=["", "bounded"])
def test_equals_plain_torch(world: Any, seed: int, is_bounded: bool) -> None:
    """The weights equal those of one process without any exchange, up to rounding of sums in another order."""
    answers = world.run(CASES, "train", seed=seed, steps=8, **(BOUNDED if is_bounded else {}))
    found: dict[str, Any] = {}
    for answer in answers:
        found.update(answer["weights"])
    expected = reference(seed, 8, is_bounded=is_bounded)
    assert set(found) == set(expected)
    for name, weight in expected.items():
        torch.testing.assert_close(torch.tensor(found[name]), weight, rtol=2e-4, atol=2e-5, msg=name)
    # 331 samples, a tenth held back. Every rank has the metrics over all of them.
    assert [answer["evaluated"] for answer in answers] == [33] * world.size
    assert len({answer["auc"] for answer in answers}) == 1


def test_no_number_of_ranks_sharding_or_backend_changes_a_bit(
    kept_world: Any, new_world: Any, seed: int, tmp_path: Path
) -> None:
    """Weights, and the quality of predictions. 24 samples in 8 slices; 33 for evaluation, in uneven slices."""
    arguments: dict[str, Any] = {"seed": seed, "steps": 20, "tables": SHARDED}
    found = [kept_world(size).run(CASES, "train", **arguments) for size in (1, 2, 3, 4)]
    for sharding in ("row_wise", "column_wise", "grid", "data_parallel"):
        found.append(kept_world(3).run(CASES, "train", sharding=sharding, **arguments))
    found.append(new_world(2, backend="gloo").run(CASES, "train", **arguments))
    assert len({(answer["sha256"], answer["auc"]) for answers in found for answer in answers}) == 1
    other = kept_world(1).run(CASES, "train", **{**arguments, "seed": seed + 1})
    assert other[0]["sha256"] != found[0][0]["sha256"]


CODED = {"gradient": "int8", "exchange": "int8"}


@pytest.mark.parametrize("options", [{}, {"dense_optimizer": "adam"}, {"dense_optimizer": "sgd"}, CODED], ids=str)
def test_resumed_run_ends_with_the_bits_of_an_uninterrupted_one(
    kept_world: Any, seed: int, tmp_path: Path, options: dict[str, str]
) -> None:
    """The run saves in the middle of the second epoch, so the resumed run must find its place in the order."""
    world = kept_world(2)
    arguments = {"seed": seed, "folder": str(tmp_path), "after": 9, **options}
    whole = world.run(CASES, "save_then_train_on", before=15, **arguments)
    resumed = world.run(CASES, "resume_and_train_on", **arguments)
    assert resumed == whole


@pytest.mark.parametrize("gradient", ["int8", "fp8", None])
def test_error_feedback_of_other_ranks_begins_at_zero(
    kept_world: Any, seed: int, tmp_path: Path, gradient: str | None
) -> None:
    arguments = {"seed": seed, "folder": str(tmp_path)}
    kept_world(2).run(CASES, "save_then_train_on", before=2, after=0, gradient="int8", **arguments)
    line = "  error feedback of gradients begins at zero: the checkpoint has that of 2 ranks"
    told = {size: kept_world(size).run(CASES, "begin_error", gradient=gradient, **arguments) for size in (2, 3)}
    assert all(message.startswith("no error\nresumes run") for messages in told.values() for message in messages)
    assert not any(line in message.splitlines() for message in told[2])
    assert all((line in message.splitlines()) == (gradient is not None) for message in told[3])
    # A checkpoint without any.
    kept_world(2).run(CASES, "save_then_train_on", before=3, after=0, **{**arguments, "folder": f"{tmp_path}/plain"})
    (message,) = kept_world(1).run(CASES, "begin_error", gradient="int8", seed=seed, folder=f"{tmp_path}/plain")
    assert line not in message.splitlines()
    assert message.startswith("no error")


@pytest.mark.parametrize(("writers", "readers"), [(2, 1), (1, 3)])
def test_a_run_resumed_with_other_ranks_and_another_sharding_ends_with_the_same_bits(
    kept_world: Any, seed: int, tmp_path: Path, writers: int, readers: int
) -> None:
    arguments = {"seed": seed, "folder": str(tmp_path), "after": 9, "tables": SHARDED}
    written = kept_world(writers).run(CASES, "save_then_train_on", before=15, **arguments)
    options = {"sharding": "row_wise", "overlap": "tables"}
    read = kept_world(readers).run(CASES, "resume_and_train_on", **options, **arguments)
    assert {tuple(answer) for answer in read} == {tuple(answer) for answer in written}


def test_tables_have_a_thread_where_it_pays(kept_world: Any) -> None:
    """All ranks choose the same: if one of them has a peer over a network, or if all have a core to spare."""
    for found in kept_world(2).run(CASES, "chosen_overlaps"):
        assert found == {
            "alone": False, "crowded": False, "one is crowded": False, "spare": True, "one is far": True,
            "ids": False, "tables": True, "none ahead": False,
        }  # fmt: skip


def test_all_ranks_have_the_plan_of_rank_0_and_it_changes_no_weight(kept_world: Any, seed: int) -> None:
    planned, given = (kept_world(2).run(CASES, "placed", seed=seed, error=error) for error in (None, "no such model"))
    for found in (planned, given):
        assert found[0]["owners"] == found[1]["owners"]
        assert found[1]["lines"] == []
    assert planned[0]["expected"] == planned[1]["expected"] > 0
    assert "ms a step expected" in planned[0]["lines"][0]
    assert "sennit calibrate measures this one" in planned[0]["lines"][0]
    # A planner that fails ends no run.
    assert given[0]["expected"] is None
    assert given[0]["lines"] == ["placement: table_wise; planning failed: RuntimeError: no such model"]
    assert {one["sha256"] for one in (*planned, *given)} == {planned[0]["sha256"]}


def test_a_run_of_one_rank_plans_nothing(kept_world: Any, seed: int) -> None:
    (found,) = kept_world(1).run(CASES, "placed", seed=seed, error="not called")
    assert (found["lines"], found["expected"]) == ([], None)


def test_full_disk_leaves_the_last_whole_checkpoint(new_world: Any, seed: int, tmp_path: Path) -> None:
    """Every rank gets the error, even those that could write."""
    messages = new_world(2).run(CASES, "save_on_a_full_disk", seed=seed, folder=str(tmp_path))
    for message in messages:
        assert "step-000000002 was not written: rank 1:" in message
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-000000001"]
    assert checkpoint.latest(tmp_path) == tmp_path / "step-000000001"


def test_a_step_calls_the_collectives_that_its_description_names(kept_world: Any, seed: int) -> None:
    """docs/how-to/train.md: ranks exchange sizes, lengths, ids, pooled vectors and gradients. The sum of dense
    gradients is no operation of c10d."""
    for called in kept_world(2).run(CASES, "collectives_of_a_step", seed=seed):
        assert called == {"c10d::alltoall_base_": 5}


@pytest.mark.parametrize("batches_ahead", [0, 1])
def test_evaluation_and_checkpoints_count_as_nothing_else(
    kept_world: Any, seed: int, tmp_path: Path, batches_ahead: int
) -> None:
    """Neither their own time nor that of their exchanges counts as training time."""
    for step, evaluation, save in kept_world(2).run(
        CASES, "phases_around_an_evaluation", seed=seed, folder=str(tmp_path), batches_ahead=batches_ahead,
        overlap="tables",
    ):  # fmt: skip
        dense = ["AllReduce", "dense backward", "dense forward", "dense update"]
        if batches_ahead:
            assert step == sorted([*dense, "wait for input", "wait for lookup"])
        else:
            tables = ["AlltoAll backward", "AlltoAll forward", "lookup", "sparse update"]
            assert step == sorted([*dense, *tables, "input", "input exchange"])
        assert evaluation == ["evaluation"]
        assert save == ["checkpoint"]


@pytest.mark.parametrize(
    "kind", ["random", "ties", "one score", "one bin", "one class", "sorted", "no samples", "both zeros"]
)
def test_quality_over_ranks_is_that_of_all_predictions_together(kept_world: Any, seed: int, kind: str) -> None:
    """AUC is equal to the last bit. Ranks have different numbers of predictions, one has none."""
    for size in (1, 3):
        for found, expected in kept_world(size).run(CASES, "quality_over_ranks", seed=seed, kind=kind):
            assert found == pytest.approx(expected, rel=1e-12, nan_ok=True)
            assert found[0] == expected[0] or kind in ("one class", "no samples")


def test_no_rank_gets_the_predictions_of_all(kept_world: Any, seed: int) -> None:
    """A rank gets at most 1.5 times an even share, or the distinct scores of one bin."""
    for share in kept_world(3).run(CASES, "largest_message", seed=seed):
        assert share < 0.5


def test_loss_that_is_not_a_number_names_the_step(kept_world: Any, seed: int) -> None:
    messages = kept_world(2).run(CASES, "loss_that_is_not_a_number", seed=seed)
    for rank, message in enumerate(messages):
        assert message.startswith(f"loss is nan at step 2 on rank {rank}")
