# SPDX-License-Identifier: Apache-2.0
"""The trainer on a device: the bits of the trainer in host memory, and checkpoints that either reads.

`device_double` stands for the GPU: it finds operations that mix devices, and counts waits.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn

from sennit.runtime.checkpoint.digest import digest
from sennit.runtime.kernels import engine as engines
from sennit.runtime.sharded.files import TableStore
from sennit.runtime.sharded.memory_limits import memory_limits
from sennit.runtime.training import resumption
from sennit.runtime.training import trainer as trainers
from sennit.runtime.training.display import ConsoleDisplay
from sennit.runtime.training.handover import Claim, Holding, find_source, take_over
from sennit.runtime.training.trainer import StepReport, Trainer
from sennit.transport.errors import SennitError
from tests.extent import briefly
from tests.runtime import device_double, stream_double
from tests.runtime.device_kernels import Kernels
from tests.runtime.trainer_runs import trainer, weights_by_histories
from tests.runtime.world import WorldFactory

pytestmark = pytest.mark.timeout(180)


@contextlib.contextmanager
def on_the_double() -> Iterator[device_double.Device]:
    """Inside, trainers have their models and tables on `device_double`."""
    with (
        device_double.Device() as device,
        mock.patch.object(engines, "implementation", side_effect=lambda *_, **__: Kernels()),
        mock.patch.object(trainers, "_device", return_value=device_double.DEVICE),
        mock.patch.object(nn.Module, "to", device_double.moved),
        stream_double.streams(),
    ):
        yield device


def train(rank: int, world: int, /, *, seed: int, there: bool, folder: str, resumed: bool, **changed: Any) -> Any:
    """Takes six steps, with a checkpoint after the second and the fourth, or takes the last two. Returns hashes.

    `there`: on the double. The last number: how often steps waited for it.
    """
    if (rows := changed.pop("rows", None)) is not None:
        changed["table_store"] = TableStore(
            folder=Path(rows), memory_bytes=40_000, device_bytes=1_000 if there else None
        )
    with on_the_double() if there else contextlib.nullcontext() as device:
        run = trainer(seed, checkpoint=Path(folder), resume=resumed, **changed)
        resumption.begin(run)
        assert run.step == 4 * resumed
        before = device.waits.total() if device else 0
        with resumption.saver_of(run.config) as saver:
            while run.step < 6:
                report = run.train_step()
                if not resumed and run.step in (2, 4):
                    now = device.waits.total() if device else 0
                    resumption.save(run, saver)
                    before += (device.waits.total() if device else 0) - now
        waits = device.waits.total() - before if device else 0
        quality = run.evaluate()
        assert next(run.model.parameters()).device == run.device
        found = [digest(run.weights()), report.loss, quality.auc, quality.log_loss]
        run.close()
        return found, waits


def uploaded(rank: int, world: int, *, seed: int, ahead: int, steps: int) -> dict[str, list[str]]:
    """What happened in each stream, in turn, until all batches that were begun are there."""
    with on_the_double(), stream_double.streams() as log, trainer(seed, batches_ahead=ahead) as run:
        for _ in range(steps):
            run.train_step()
        run._ahead.drop()
    found: dict[str, list[str]] = {}
    for stream, _, what in (entry.partition(": ") for entry in log):
        found.setdefault(stream, []).append(what)
    return found


def not_awaited(rank: int, world: int, *, seed: int) -> str:
    """The error of a step whose stream waits for no copies."""
    unawaited = mock.patch.object(stream_double.Stream, "wait_event")
    with on_the_double(), unawaited, trainer(seed) as run:
        return str(run.train_step().loss)


def handed_over(rank: int, world: int, /, *, seed: int, there: bool, **changed: Any) -> list[str]:
    """Three steps, the last two of them by a new trainer that places tables differently."""
    with on_the_double() if there else contextlib.nullcontext():
        run = trainer(seed, dense_optimizer="adam", **changed)
        run.train_step()
        holding = Holding.of(run)
        claims: list[Any] = [None] * world
        dist.all_gather_object(claims, Claim(step=1, shards=holding.shards))
        later = trainer(seed, dense_optimizer="adam", sharding="data_parallel", **changed)
        source = find_source(claims, {shard for claim in claims for shard in claim.shards})
        assert source is not None
        take_over(later, source, holding)
        later.source.begin(1)
        for one in (run, later):
            while one.step < 3:
                one.train_step()
        return [digest(one.weights()) for one in (run, later)]


def broken(rank: int, world: int, *, seed: int, folder: str) -> str:
    """Weights become NaN after the second of five steps, each with a checkpoint. Returns what was saved, and errors.

    Without checkpoints the error is that of the tables: two steps later, since a batch was on its way already.
    """
    told = []
    each_step: dict[str, Any] = {"checkpoint": Path(folder), "checkpoint_every": 1}
    for options in (each_step, {}):
        saved: list[int] = []
        with on_the_double():
            run = trainer(seed, max_steps=5, **options)

            def spoil(report: StepReport, run: Trainer = run) -> None:
                if report.step == 2:
                    device_double.host_of(next(run.model.parameters()).data).fill_(torch.nan)

            try:
                run.run(spoil, lambda *_: False, saved.append)
            except SennitError as error:
                told.append(f"{saved} {run.step} {type(error).__name__}")
    return ", ".join(told)


def limits(rank: int, world: int) -> list[int]:
    """Ranks 0 and 1 share a GPU with 3,000 and 2,000 free bytes, as they see it; rank 2 has one with 500."""
    uuid, free = [("a", 3000), ("a", 2000), ("b", 500)][rank]
    with (
        mock.patch("torch.cuda.get_device_properties", return_value=mock.Mock(uuid=uuid)),
        mock.patch("torch.cuda.mem_get_info", return_value=(free, 1 << 20)),
    ):
        return memory_limits(device=torch.device("cuda:0"))


def histories(rank: int, world: int, /, *, there: bool) -> tuple[str, dict[str, list[float]]]:
    """Digest and weights of `hstu` after some steps. On the double attention is the native one, on its memory."""
    with on_the_double() if there else contextlib.nullcontext():
        found = weights_by_histories("row_wise", steps=3)
        return digest(found), {name: weight.flatten().tolist() for name, weight in found.items()}


PLANS: dict[str, dict[str, Any]] = {
    "plain": {},
    "increments": {"checkpoint_increments": 4, "sharding": "row_wise", "row_shards": 4, "checkpoint_async": True},
    "stored": {"sharding": "row_wise", "row_shards": 4, "checkpoint_increments": 4},
    "coded": {"exchange": "int8"},
    "dynamic": {
        "tables": '[defaults]\nids = "dynamic"\nrows = 40\nrow_shards = 4\n'
        "[tables.user]\nids = { admit_after = 2, unadmitted = 'shared' }",
        "checkpoint_increments": 4,
        "sharding": "row_wise",
    },
    "others": {"dense_optimizer": "adam", "clip_norm": 0.01, "sharding": "data_parallel", "gradient": "int8"},
}


@pytest.mark.parametrize("plan", briefly(PLANS, ["increments"]))
def test_it_has_the_bits_of_host_memory(kept_world: WorldFactory, seed: int, tmp_path: Path, plan: str) -> None:
    """Each run also goes on from the other's checkpoint."""
    world = kept_world(2)
    plan_of = PLANS[plan] | ({"rows": str(tmp_path)} if plan == "stored" else {})

    def trained(*, there: bool, folder: str, resumed: bool = False) -> Any:
        found = world.run(train, seed=seed, there=there, folder=str(tmp_path / folder), resumed=resumed, **plan_of)
        # The gradients of a step, which travel from host memory; numbers of rows of replicated tables; changed rows of
        # files, with their states; and what is coded on its way, there and back.
        waits_of_step = {"others": 2, "stored": 3, "coded": 3}.get(plan, 1)
        assert {waits for _, waits in found} == {there * waits_of_step * (2 if resumed else 6)}
        return [result for result, _ in found]

    wanted = trained(there=False, folder="host")
    assert trained(there=True, folder="device") == wanted
    if plan != "others":
        assert trained(there=True, folder="host", resumed=True) == wanted
        assert trained(there=False, folder="device", resumed=True) == wanted


def test_histories_are_trained_there(kept_world: WorldFactory) -> None:
    """Nested tensors, their offsets, times and lengths are there: nothing mixes devices.

    What the double computes of gradients is rounded otherwise than in host memory, so values are compared.
    """
    wanted, found = (kept_world(2).run(histories, there=there) for there in (False, True))
    assert found[0][0] == found[1][0]
    for (_, ours), (_, theirs) in zip(found, wanted, strict=True):
        assert ours.keys() == theirs.keys()
        for name, weights in theirs.items():
            assert ours[name] == pytest.approx(weights, rel=1e-3, abs=1e-4), name


@pytest.mark.parametrize("ahead", briefly([1, 3], [3]))
def test_input_is_copied_there_beside_the_steps_before(kept_world: WorldFactory, seed: int, ahead: int) -> None:
    """The double refuses to let the host wait for a stream, an event or the device."""
    steps = 4
    for streams in kept_world(2).run(uploaded, seed=seed, ahead=ahead, steps=steps):
        step, samples, *tables = (streams.pop(name) for name in ("step", "copies 1", *sorted(streams)[1:-1]))
        # Dense features and labels.
        assert samples == ["copy", "copy", "record"] * (steps + ahead)
        assert step.count("waits for copies 1") == steps
        # Lengths and ids, which the lookup and the update read.
        assert tables
        assert all(ids == samples for ids in tables)
        for number in range(2, 2 + len(tables)):
            assert step.count(f"waits for copies {number}") == 2 * steps
        assert step.count("keeps a tensor") == 2 * sum(what.startswith("waits") for what in step)


def test_a_step_that_did_not_wait_for_its_copies_would_be_seen(kept_world: WorldFactory, seed: int) -> None:
    assert kept_world(2).run(not_awaited, seed=seed) == ["nan"] * 2


def test_a_handover_keeps_them(kept_world: WorldFactory, seed: int) -> None:
    wanted = kept_world(2).run(handed_over, seed=seed, there=False)
    assert wanted[0][0] == wanted[0][1]
    assert kept_world(2).run(handed_over, seed=seed, there=True) == wanted
    # Error feedback belongs to a place in the old group. It begins at zero.
    coded = kept_world(2).run(handed_over, seed=seed, there=False, gradient="int8")
    assert coded[0] == coded[1]
    assert coded[0][0] != coded[0][1]


def test_no_broken_weights_are_saved(kept_world: WorldFactory, seed: int, tmp_path: Path) -> None:
    """Nothing waits for the loss of a step but what shows it or needs it."""
    told = "[1, 2] 3 TrainingError, [] 4 GradientError"
    assert kept_world(2).run(broken, seed=seed, folder=str(tmp_path)) == [told] * 2


def test_tables_get_the_memory_of_their_gpu(kept_world: WorldFactory) -> None:
    assert kept_world(3).run(limits) == [[900, 900, 450]] * 3


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_display_reads_the_losses_that_it_shows(is_terminal: bool) -> None:
    """Reading one waits for the device."""
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=is_terminal, width=120)
    display = ConsoleDisplay(console, batch_size=4)
    losses = [mock.MagicMock(**{"__float__.return_value": float(number)}) for number in range(1000)]
    for step, loss in enumerate(losses):
        display.on_step(StepReport(step=step + 1, step_count=1000, epoch=0, samples=4, loss_sum=loss))
    display.close()
    assert sum(loss.__float__.called for loss in losses) < len(losses) - 100
    assert ("loss 249.7500" in shown.getvalue()) == is_terminal
