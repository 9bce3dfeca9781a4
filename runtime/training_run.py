# SPDX-License-Identifier: Apache-2.0
"""One rank's run from start to end: join the group, load, train, report, leave."""

from __future__ import annotations

import datetime
import gc
import time
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from sennit.runtime import checkpoint
from sennit.runtime.backend import BACKEND_NAME, communicator, register
from sennit.runtime.data import sources
from sennit.runtime.display import ConsoleDisplay, Listener, Listeners, TensorBoardLog, stdout_console
from sennit.runtime.elastic import reconfigure
from sennit.runtime.fingerprint import fingerprint
from sennit.runtime.metrics import Quality
from sennit.runtime.report import Change, RankReport, RunReport, render, write_json
from sennit.runtime.trainer import StepReport, Trainer
from sennit.runtime.training_config import TrainingConfig
from sennit.transport.errors import PeerError
from sennit.transport.membership import Terms


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where this process stands in the group. `store` None: the environment says it (torchrun)."""

    rank: int
    world_size: int
    store: Store | None = None


def run_rank(config: TrainingConfig, place: Place) -> RunReport:
    """The whole run of one rank. Makes and destroys the default process group."""
    # One thread a rank: ranks share the cores, and more threads would make sums depend on their number.
    torch.set_num_threads(1)
    # Also where neither torch's entry point nor `import sennit` has done it.
    register()
    timeout = datetime.timedelta(seconds=config.timeout_s)
    if place.store is None:
        dist.init_process_group(config.backend, timeout=timeout)
    else:
        dist.init_process_group(
            config.backend, store=place.store, rank=place.rank, world_size=place.world_size, timeout=timeout
        )
    # After a failure the group is left to the end of the process: taking it down may wait for peers that are gone.
    report = _train_elastically(config) if config.elastic else _train_to_the_end(config, [])
    # DDP's hooks hold the group; they have to go first.
    gc.collect()
    dist.destroy_process_group()
    return report


def _train_to_the_end(config: TrainingConfig, changes: list[Change]) -> RunReport:
    report = train(config, changes)
    # Nobody leaves while another still needs an answer.
    dist.barrier()
    return report


def _train_elastically(config: TrainingConfig) -> RunReport:
    """Trains until a run over the ranks that are left comes to its end."""
    changes: list[Change] = []
    while True:
        try:
            return _train_to_the_end(config, changes)
        except Exception:
            # An error of this rank's own is not cured by going on.
            reason = communicator().failure
            if not reason:
                raise
        # The error's frames held the trainer, with the old group in it.
        gc.collect()
        before = dist.get_world_size()
        view = reconfigure(Terms(timeout_s=config.timeout_s, min_world=config.min_ranks))
        lost = sorted(set(range(before)) - set(view.previous_ranks))
        if not lost:
            raise PeerError(f"all ranks live, so going on would end like this again: {reason}")
        changes.append(Change(lost=lost, world_size=view.world, reason=reason))
        config = replace(config, resume=config.checkpoint is not None)


def train(config: TrainingConfig, changes: list[Change]) -> RunReport:
    """Trains in the default process group, prints and writes what rank 0 should. Collective.

    `changes`: how an elastic run came to its present ranks; the last one learns here where training goes on.
    """
    before = transport_counters(config.backend)
    trainer = Trainer(config, sources.load(config.source, seed=config.seed))
    first = trainer.rank == 0
    if config.resume and config.checkpoint is not None:
        _resume(trainer, config)
    first_step = trainer.step
    if changes:
        changes[-1] = replace(changes[-1], step=first_step)
        if first:
            stdout_console().print(str(changes[-1]))
    last_loss: list[float] = []

    listeners: list[Listener] = []
    if first:
        listeners.append(ConsoleDisplay(stdout_console(), batch_size=config.batch_size))
        if config.tensorboard is not None:
            listeners.append(TensorBoardLog(config.tensorboard))
    with Listeners(listeners) as heard:

        def on_step(step: StepReport) -> None:
            last_loss[:] = [step.loss]
            heard.on_step(step)

        def on_epoch(epoch: int, quality: Quality) -> None:
            heard.on_epoch(epoch, trainer.step, quality)

        def on_checkpoint(step: int) -> None:
            assert config.checkpoint is not None
            checkpoint.save(config.checkpoint, step, trainer.state())

        began = time.perf_counter()
        result = trainer.run(on_step, on_epoch, on_checkpoint)
        run_s = time.perf_counter() - began

    after = transport_counters(config.backend)
    mine = RankReport(
        tables=[table.name for table in trainer.shard.tables],
        phases_s=dict(trainer.clock.seconds),
        counters={name: count - before.get(name, 0) for name, count in after.items()},
    )
    gathered: list[RankReport | None] = [None] * trainer.world_size
    dist.all_gather_object(gathered, mine)
    report = RunReport(
        config=config,
        ranks=[rank for rank in gathered if rank is not None],
        sample_count=(trainer.step - first_step) * config.batch_size,
        first_step=first_step,
        run_s=run_s,
        step=trainer.step,
        final_loss=last_loss[0] if last_loss else None,
        quality=result,
        weights_sha256=fingerprint(trainer.weights()),
        changes=changes,
    )
    if first:
        render(report, stdout_console())
        if config.json_path is not None:
            write_json(report, config.json_path)
    return report


def transport_counters(backend: str) -> dict[str, int]:
    """The counters of sennit's default group; other backends have none."""
    return communicator().counters() if backend == BACKEND_NAME else {}


def _resume(trainer: Trainer, config: TrainingConfig) -> None:
    assert config.checkpoint is not None
    # Rank 0 looks, so that all ranks take the same one.
    found = [checkpoint.latest(config.checkpoint) if trainer.rank == 0 else None]
    dist.broadcast_object_list(found, src=0)
    if found[0] is None:
        return
    state = trainer.state()
    checkpoint.load(found[0], state)
    trainer.restore(state)
