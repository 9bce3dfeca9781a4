# SPDX-License-Identifier: Apache-2.0
"""Training with ranks: close to a plain torch loop, repeatable bit for bit, and resumed from checkpoints."""

from __future__ import annotations

import resource
import signal
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from sennit.runtime.checkpoint import folder as checkpoint
from sennit.runtime.checkpoint.digest import digest
from sennit.runtime.checkpoint.manifest import CheckpointError
from sennit.runtime.data.raw_samples import RawSamples
from sennit.runtime.data.seeds import numpy_stream
from sennit.runtime.training import overlap, planned, resumption
from sennit.runtime.training.config import TrainingConfig
from sennit.runtime.training.predictions import Predictions, quality
from sennit.runtime.training.trainer import TrainingError
from tests.extent import briefly
from tests.runtime.short_sources import fitted, opened
from tests.runtime.stream.test_stream_order import rows_of
from tests.runtime.trainer_runs import (
    SMALL,
    begin_error,
    config_of,
    resume_and_train_on,
    samples,
    save_then_train_on,
    train,
    trainer,
)
from tests.runtime.world import WorldFactory


def placed(rank: int, world: int, /, *, seed: int, error: str | None, **changed: Any) -> dict[str, Any]:
    """Where the shards of a run that plans are, and the lines that it prints. `error`: of the planner, on rank 0."""
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planned, "_tell", lines.append)
        if error is not None and rank == 0:
            patch.setattr(planned, "search", mock.Mock(side_effect=RuntimeError(error)))
        run = trainer(seed, sharding="auto", **changed)
    return {
        "owners": {str(shard): owner for shard, owner in run.tables.placement.owner_of.items()},
        "expected": run.predicted_s,
        "lines": lines,
        "sha256": digest(run.weights()),
    }


def save_on_a_full_disk(rank: int, world: int, *, seed: int, folder: str) -> str:
    """Saves one good checkpoint, then one where the last rank may write at most 1 KiB to each file."""
    run = trainer(seed, checkpoint=Path(folder))
    run.step = 1
    resumption.save(run)
    run.step = 2
    if rank == world - 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, resource.RLIM_INFINITY))
    try:
        resumption.save(run)
    except CheckpointError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        dist.barrier()
    return "no error"


def loss_that_is_not_a_number(rank: int, world: int, *, seed: int) -> str:
    run = trainer(seed)
    run.train_step()
    with torch.no_grad():
        next(run.model.parameters()).fill_(torch.nan)
    try:
        run.train_step()
    except TrainingError as error:
        return str(error)
    return "no error"


def collectives_of_a_step(rank: int, world: int, *, seed: int) -> dict[str, int]:
    """Returns how often one step calls each operation of a process group, as torch's profiler counts it."""
    run = trainer(seed, batches_ahead=0)  # The profiler sees this thread.
    run.train_step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run.train_step()
    names = [event.name for event in profile.events() if event.name.startswith("c10d::")]
    return {name: names.count(name) for name in sorted(set(names))}


def phases_around_an_evaluation(rank: int, world: int, /, *, seed: int, folder: str, **options: Any) -> list[list[str]]:
    """Returns the phases whose time changed: in a step, in an evaluation, in a checkpoint."""
    run = trainer(seed, checkpoint=Path(folder), **options)

    def save() -> None:
        with run.clock.phase("checkpoint", is_whole=True):
            resumption.save(run)

    changed = []
    for action in (run.train_step, run.evaluate, save):
        before = dict(run.clock.seconds)
        action()
        changed.append(sorted(name for name, seconds in run.clock.seconds.items() if seconds != before.get(name)))
    return changed


def chosen_overlaps(rank: int, world: int) -> dict[str, bool]:
    """Whether tables have a thread of their own, on machines that are made up."""

    def chosen(cores: int, routes: tuple[str, ...] = ("self", "shm"), **options: Any) -> bool:
        group = SimpleNamespace(routes=routes, ranks_here=2)
        with (
            mock.patch.object(overlap, "cores_here", return_value=cores),
            mock.patch.object(overlap, "communicator_or_names", return_value=group),
        ):
            return overlap.overlap_of(TrainingConfig(**options)).has_tables

    with mock.patch.object(dist, "get_world_size", return_value=1):
        alone = chosen(100)
    return {
        "alone": alone,
        "crowded": chosen(3),
        "one is crowded": chosen(3 if rank else 4),
        "spare": chosen(4),
        "one is far": chosen(1, ("self", "udp") if rank else ("self", "shm")),
        "ids": chosen(100, overlap="ids"),
        "tables": chosen(1, overlap="tables"),
        "none ahead": chosen(100, batches_ahead=0),
    }


def predictions(rank: int, world: int, *, seed: int, kind: str, count: int = 3000) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the predictions of one rank. The last of several ranks has none."""
    stream = numpy_stream(seed, "predictions", rank, kind)
    count = 0 if kind == "no samples" or 0 < rank == world - 1 else count + 100 * rank
    scores = stream.standard_normal(count)
    match kind:
        case "ties":
            scores[:] = np.round(scores, 1)
        case "one score":
            scores[:] = 0
        case "one bin":
            scores[:] = 1.5 + stream.integers(0, 50, count) * 2.0**-23
        case "sorted":
            scores += 100 * rank
        case "huge":
            scores *= 1e9
            scores[: 1 - rank] = 1e20
        case "both zeros":
            scores[:] = np.where(stream.random(count) < 0.5, -0.0, 0.0)
    chance = 0.0 if kind == "one class" else 1 / (1 + np.exp(-np.clip(scores, -50, 50)))
    labels = stream.random(count) < chance
    return torch.from_numpy(scores.astype(np.float32)), torch.from_numpy(labels.astype(np.float32))


def predicted(logits: torch.Tensor, labels: torch.Tensor) -> Predictions:
    """What a rank keeps of batches of 1,000."""
    found = Predictions()
    for some, wanted in zip(torch.split(logits, 1_000), torch.split(labels, 1_000), strict=True):
        found.add(some.numpy(), wanted.numpy())
    return found


def quality_over_ranks(rank: int, world: int, *, seed: int, kind: str) -> list[list[float]]:
    """Returns the metrics that the ranks compute together, and those of one process with all predictions."""
    parts = [predictions(other, world, seed=seed, kind=kind) for other in range(world)]
    logits, labels = (torch.cat([part[side] for part in parts]).numpy() for side in (0, 1))
    both = predicted(*parts[rank]).quality_of_ranks(), quality(logits, labels)
    return [[value for value in astuple(found) if value is not None] for found in both]


def largest_message(rank: int, world: int, *, seed: int) -> float:
    """Returns the largest share of all predictions that a rank gets."""
    logits, labels = predictions(rank, world + 1, seed=seed, kind="random", count=20_000)
    exchange, received = dist.all_to_all_single, []

    def watched(output: torch.Tensor, *rest: Any, **options: Any) -> Any:
        received.append(len(output))
        return exchange(output, *rest, **options)

    dist.all_to_all_single = watched
    try:
        predicted(logits, labels).quality_of_ranks()
    finally:
        dist.all_to_all_single = exchange
    return max(received) / (world * 20_000)


SHARDED = "[defaults]\nrow_shards = 4\ncolumn_shards = 2\n"


@pytest.fixture(params=["sennit-1", "sennit-2", "gloo-2"])
def world(request: pytest.FixtureRequest, kept_world: WorldFactory, new_world: WorldFactory) -> Any:
    """A world of each kind. Other tests share the worlds over sennit."""
    backend, size = request.param.split("-")
    return kept_world(int(size)) if backend == "sennit" else new_world(int(size), backend=backend)


def reference(seed: int, steps: int, *, is_bounded: bool) -> dict[str, torch.Tensor]:
    """Trains the same model in one process: autograd lookups as in `nn.EmbeddingBag`, dense gradients, no exchange.

    `is_bounded`: with all of `BOUNDED`.
    """
    from sennit.runtime.model.factory import build
    from sennit.runtime.model.inputs import ModelInputs
    from sennit.runtime.sharded.initial import fill
    from sennit.runtime.sharded.tables import Shard, Table

    found = opened(samples(seed), config_of(seed))
    whole = fitted(found).apply(RawSamples.of(samples(seed))).samples()
    batch_size, dim = SMALL["batch_size"], SMALL["embedding_dim"]
    step_count = found.order.step_count
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
        rows = torch.from_numpy(rows_of(found.order, step))
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


BOUNDED: dict[str, Any] = {
    "decay": "polynomial",
    "warmup": 3,
    "clip_value": 0.001,
    "clip_norm": 0.0015,
    "weight_decay": 0.01,
}


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
    answers = world.run(train, seed=seed, steps=8, **(BOUNDED if is_bounded else {}))
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
    kept_world: WorldFactory, new_world: WorldFactory, seed: int, tmp_path: Path
) -> None:
    """Weights, and the quality of predictions. 24 samples in 8 slices; 33 for evaluation, in uneven slices."""
    arguments: dict[str, Any] = {"seed": seed, "steps": 8, "tables": SHARDED}
    found = [kept_world(size).run(train, **arguments) for size in (1, 2, 3)]
    for sharding in ("row_wise", "column_wise", "grid", "data_parallel"):
        found.append(kept_world(3).run(train, sharding=sharding, **arguments))
    found.append(new_world(2, backend="gloo").run(train, **arguments))
    assert len({(answer["sha256"], answer["auc"]) for answers in found for answer in answers}) == 1
    other = kept_world(1).run(train, **{**arguments, "seed": seed + 1})
    assert other[0]["sha256"] != found[0][0]["sha256"]


CODED: dict[str, Any] = {"gradient": "int8", "exchange": "int8"}


@pytest.mark.parametrize(
    "options",
    briefly(
        [
            {"optimizer": "sgd", "momentum": 0.9},
            {"dense_optimizer": "adam", "optimizer": "adamw"},
            {"dense_optimizer": "sgd", "optimizer": "ftrl"},
            CODED,
        ],
        [{"dense_optimizer": "adam", "optimizer": "adamw"}, CODED],
    ),
    ids=str,
)
def test_resumed_run_ends_with_the_bits_of_an_uninterrupted_one(
    kept_world: WorldFactory, seed: int, tmp_path: Path, options: dict[str, str]
) -> None:
    """The run saves in the middle of the second epoch, so the resumed run must find its place in the order."""
    world = kept_world(2)
    arguments: dict[str, Any] = {"seed": seed, "folder": str(tmp_path), "after": 9, **options}
    whole = world.run(save_then_train_on, before=15, **arguments)
    resumed = world.run(resume_and_train_on, **arguments)
    assert resumed == whole


def settings_after_resuming(rank: int, world: int, *, seed: int, folder: str) -> list[Any]:
    """Weight decays of the dense optimizer and of tables in a resumed run, and the updates that tables have had."""
    run = trainer(seed, checkpoint=Path(folder), resume=True, weight_decay=0.5, tables=OTHER_EPSILON)
    resumption.begin(run)
    decays = {group["weight_decay"] for group in run.optimizer.param_groups}
    decays |= {table.optimizer.weight_decay for table in run.tables.tables}
    run.train_step()
    assert {group["weight_decay"] for group in run.optimizer.param_groups} <= decays
    return [decays, run.tables.steps.tolist()]


OTHER_EPSILON = '[defaults.optimizer]\nkind = "adam"\n[tables.user.optimizer]\nepsilon = 1e-4\n'


def test_settings_of_optimizers_are_those_of_the_command(kept_world: WorldFactory, seed: int, tmp_path: Path) -> None:
    """Of dense parameters and of tables. One table's setting cuts tables into other groups, and all can be read."""
    arguments: dict[str, Any] = {"seed": seed, "folder": str(tmp_path)}
    adam = '[defaults.optimizer]\nkind = "adam"\n'
    kept_world(2).run(save_then_train_on, before=4, after=0, tables=adam, **arguments)
    assert kept_world(2).run(settings_after_resuming, **arguments) == [[{0.5}, [5, 5, 5]]] * 2


@pytest.mark.parametrize("gradient", briefly(["int8", "fp8", None], ["int8", None]))
def test_error_feedback_of_other_ranks_begins_at_zero(
    kept_world: WorldFactory, seed: int, tmp_path: Path, gradient: str | None
) -> None:
    arguments: dict[str, Any] = {"seed": seed, "folder": str(tmp_path)}
    kept_world(2).run(save_then_train_on, before=2, after=0, gradient="int8", **arguments)
    line = "  error feedback of gradients begins at zero: the checkpoint has that of 2 ranks"
    told = {size: kept_world(size).run(begin_error, gradient=gradient, **arguments) for size in (2, 3)}
    assert all(message.startswith("no error\nresumes run") for messages in told.values() for message in messages)
    assert not any(line in message.splitlines() for message in told[2])
    assert all((line in message.splitlines()) == (gradient is not None) for message in told[3])
    # A checkpoint without any.
    kept_world(2).run(save_then_train_on, before=3, after=0, **{**arguments, "folder": f"{tmp_path}/plain"})
    (message,) = kept_world(1).run(begin_error, gradient="int8", seed=seed, folder=f"{tmp_path}/plain")
    assert line not in message.splitlines()
    assert message.startswith("no error")


@pytest.mark.parametrize(("writers", "readers"), briefly([(2, 1), (1, 3)], [(1, 3)]))
def test_a_run_resumed_with_other_ranks_and_another_sharding_ends_with_the_same_bits(
    kept_world: WorldFactory, seed: int, tmp_path: Path, writers: int, readers: int
) -> None:
    arguments: dict[str, Any] = {"seed": seed, "folder": str(tmp_path), "after": 9, "tables": SHARDED}
    written = kept_world(writers).run(save_then_train_on, before=15, **arguments)
    options: dict[str, Any] = {"sharding": "row_wise", "overlap": "tables"}
    read = kept_world(readers).run(resume_and_train_on, **options, **arguments)
    assert {tuple(answer) for answer in read} == {tuple(answer) for answer in written}


def test_tables_have_a_thread_where_it_pays(kept_world: WorldFactory) -> None:
    """All ranks choose the same: if one of them has a peer over a network, or if all have a core to spare."""
    for found in kept_world(2).run(chosen_overlaps):
        assert found == {
            "alone": False, "crowded": False, "one is crowded": False, "spare": True, "one is far": True,
            "ids": False, "tables": True, "none ahead": False,
        }  # fmt: skip


def test_all_ranks_have_the_plan_of_rank_0_and_it_changes_no_weight(kept_world: WorldFactory, seed: int) -> None:
    planned, given = (kept_world(2).run(placed, seed=seed, error=error) for error in (None, "no such model"))
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


def test_a_run_of_one_rank_plans_nothing(kept_world: WorldFactory, seed: int) -> None:
    (found,) = kept_world(1).run(placed, seed=seed, error="not called")
    assert (found["lines"], found["expected"]) == ([], None)


def test_full_disk_leaves_the_last_whole_checkpoint(new_world: WorldFactory, seed: int, tmp_path: Path) -> None:
    """Every rank gets the error, even those that could write."""
    messages = new_world(2).run(save_on_a_full_disk, seed=seed, folder=str(tmp_path))
    for message in messages:
        assert "step-000000002 was not written: rank 1:" in message
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-000000001"]
    assert checkpoint.latest(tmp_path) == tmp_path / "step-000000001"


def test_a_step_calls_the_collectives_that_its_description_names(kept_world: WorldFactory, seed: int) -> None:
    """docs/how-to/train.md: ranks exchange sizes, lengths, ids, pooled vectors and gradients, and say which tables the
    loss depends on. The sum of dense gradients is no operation of c10d."""
    for called in kept_world(2).run(collectives_of_a_step, seed=seed):
        assert called == {"c10d::alltoall_base_": 5, "c10d::allreduce_": 1}


@pytest.mark.parametrize("batches_ahead", [0, 1])
def test_evaluation_and_checkpoints_count_as_nothing_else(
    kept_world: WorldFactory, seed: int, tmp_path: Path, batches_ahead: int
) -> None:
    """Neither their own time nor that of their exchanges counts as training time."""
    for step, evaluation, save in kept_world(2).run(
        phases_around_an_evaluation, seed=seed, folder=str(tmp_path), batches_ahead=batches_ahead,
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
    "kind", ["random", "ties", "one score", "one bin", "one class", "sorted", "no samples", "huge", "both zeros"]
)
def test_quality_over_ranks_is_that_of_all_predictions_together(kept_world: WorldFactory, seed: int, kind: str) -> None:
    """AUC is equal to the last bit. Ranks have different numbers of predictions, one has none."""
    for size in (1, 3):
        for found, expected in kept_world(size).run(quality_over_ranks, seed=seed, kind=kind):
            assert found == pytest.approx(expected, rel=1e-12, nan_ok=True)
            assert found[0] == expected[0] or kind in ("one class", "no samples")
            assert found == expected or kind != "huge"


def test_no_rank_gets_the_predictions_of_all(kept_world: WorldFactory, seed: int) -> None:
    """A rank gets at most 1.5 times an even share, or the distinct scores of one bin."""
    for share in kept_world(3).run(largest_message, seed=seed):
        assert share < 0.5


def test_loss_that_is_not_a_number_names_the_step(kept_world: WorldFactory, seed: int) -> None:
    messages = kept_world(2).run(loss_that_is_not_a_number, seed=seed)
    for rank, message in enumerate(messages):
        assert message.startswith(f"loss is nan at step 2 on rank {rank}")
