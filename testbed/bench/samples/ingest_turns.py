# SPDX-License-Identifier: Apache-2.0
"""The training process of `sennit bench ingest`: one rank, from memory and from feeders in turns.

`python -m sennit.testbed.bench.samples.ingest_turns DATA TURNS STEPS TARGET…`; its last line is JSON.
The agent of SENNIT_AGENT loads the programs of targets that begin with "agent+".
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import time

import torch
import torch.distributed as dist

from sennit.offload.agent.receiver import VARIABLE
from sennit.offload.ingest.target import IngestTarget
from sennit.runtime.backend.process_group import BACKEND_NAME, register
from sennit.runtime.backend.torch_versions import HashStore
from sennit.runtime.checkpoint.digest import digest
from sennit.runtime.data.batch_source import BatchSource
from sennit.runtime.data.source import Source
from sennit.runtime.ingest.fed import Door, FedSource
from sennit.runtime.training.config import TrainingConfig
from sennit.runtime.training.streamed import sources_of
from sennit.runtime.training.trainer import Trainer

TIMEOUT_S = 60.0
EPOCHS_MAX = 1000
MEMORY, BY_AGENT = "memory", "agent+"


def main(data: str, turns: int, steps: int, targets: list[str]) -> None:
    torch.set_num_threads(1)
    register()
    timeout = datetime.timedelta(seconds=TIMEOUT_S)
    dist.init_process_group(BACKEND_NAME, store=HashStore(), rank=0, world_size=1, timeout=timeout)
    trainers: dict[str, Trainer] = {}
    fed: dict[str, FedSource] = {}
    agent = os.environ.get(VARIABLE, "")
    for name in (MEMORY, *targets):
        target = None if name == MEMORY else IngestTarget.parse(name.removeprefix(BY_AGENT))
        config = TrainingConfig(source=Source(data=data), ingest=target, epochs=EPOCHS_MAX, timeout_s=TIMEOUT_S)
        source: BatchSource
        if target is None:
            source = sources_of(config)()
        else:
            source = fed[name] = FedSource(
                Door(target, 0),
                config.order_settings,
                config.stream,
                rank=0,
                world_size=1,
                timeout_s=TIMEOUT_S,
                is_elastic=False,
            )
        trainers[name] = Trainer(config, source)
        os.environ[VARIABLE] = agent if name.startswith(BY_AGENT) else ""
        source.begin(0)
    names = list(trainers)
    for name in names:  # steps that pay one-time costs
        _turn(trainers[name], steps)
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for turn in range(turns):
        for place in range(len(names)):
            name = names[(turn + place) % len(names)]
            taken[name].append(_turn(trainers[name], steps))
    if len({digest(trainer.weights()) for trainer in trainers.values()}) != 1:
        raise RuntimeError("the weights differ")
    counters = {name: source.counters() for name, source in fed.items()}
    for source in fed.values():
        source.close()
    print(json.dumps({"batch_size": TrainingConfig().batch_size, "turns": taken, "counters": counters}))


def _turn(trainer: Trainer, steps: int) -> tuple[float, float]:
    """Seconds of these steps, and of their waits for input. An evaluation in between is not counted."""
    elapsed_s, input_before_s = 0.0, _input_s(trainer)
    for _ in range(steps):
        began_s = time.perf_counter()
        trainer.train_step()
        elapsed_s += time.perf_counter() - began_s
        if trainer.step % trainer.steps_per_epoch == 0:
            trainer.evaluate()
    return elapsed_s, _input_s(trainer) - input_before_s


def _input_s(trainer: Trainer) -> float:
    """A batch is taken in the step's own thread, or ahead in another one, for which the step may have to wait."""
    return sum(trainer.clock.seconds.get(name, 0.0) for name in ("input", "wait for input"))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
