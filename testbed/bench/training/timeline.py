# SPDX-License-Identifier: Apache-2.0
"""`sennit bench timeline`: what it costs to record a timeline of a training run.

Two trainers in the same processes, one recorded and one not, take turns of a few steps, in random order. A ratio is of
two turns that follow each other, so that other load of the machine meets both.
"""

from __future__ import annotations

import contextlib
import random
import secrets
from dataclasses import asdict, dataclass
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from sennit.runtime.backend.torch_versions import Store
from sennit.runtime.calibrate import machine
from sennit.runtime.timeline import Timeline
from sennit.runtime.timeline.rank_log import RankLog
from sennit.runtime.training import launch
from sennit.runtime.training.config import TrainingConfig
from sennit.runtime.training.streamed import sources_of
from sennit.runtime.training.trainer import Trainer
from sennit.testbed.bench.training.turns import TurnSettings, joined, median_and_interval, turn_of

PLAIN, RECORDED = 0, 1
WARM_TURNS: Final = 4
LOG_ROOM: Final = 1_000
TIMEOUT_S: Final = 120.0


@dataclass(frozen=True, kw_only=True)
class Settings(TurnSettings):
    """What to run. A round is a turn with a timeline and one without."""

    world: int = 2
    batch_size: int = 2_048
    rounds: int = 300

    def config(self) -> TrainingConfig:
        return self.endless(batch_size=self.batch_size, timeout_s=TIMEOUT_S)


@dataclass(frozen=True, kw_only=True)
class Report:
    """(seconds, processor seconds) of each turn of a rank, without and with a timeline."""

    settings: Settings
    machine: dict[str, object]
    turns: list[list[list[tuple[float, float]]]]
    """[rank][PLAIN or RECORDED][round]"""

    def ratios(self, which: int) -> list[float]:
        """Recorded / plain: of the time of the slowest rank (0), or of all ranks' processor time (1)."""
        together = max if which == 0 else sum
        return [
            together(rank[RECORDED][number][which] for rank in self.turns)
            / together(rank[PLAIN][number][which] for rank in self.turns)
            for number in range(self.settings.rounds)
        ]

    def as_json(self) -> dict[str, Any]:
        return {
            "settings": asdict(self.settings),
            "machine": self.machine,
            "time": median_and_interval(self.ratios(0)),
            "processor time": median_and_interval(self.ratios(1)),
            "turns": self.turns,
        }


def run(settings: Settings) -> Report:
    """Raises `launch.RankFailure` if a rank fails, or if a timeline changes a weight."""
    turns = launch.run_ranks(_take_turns, settings, settings.world, timeout_s=TIMEOUT_S)
    return Report(settings=settings, machine=machine.describe(), turns=turns)


def _take_turns(settings: Settings, rank: int, world: int, store: Store) -> list[list[tuple[float, float]]]:
    with joined(rank, world, store, timeout_s=TIMEOUT_S):
        config = settings.config()
        make_source = sources_of(config)
        # The timeline is not entered: nothing is gathered or written, and it records in its own turns alone.
        timeline = Timeline("never written")
        log = RankLog.create(secrets.token_hex(8), rank=rank, path=timeline.path, room=LOG_ROOM)
        with contextlib.ExitStack() as stack:
            stack.callback(log.close)
            stack.callback(log.remove)
            trainers = []
            for recording in (None, timeline):
                source = make_source()
                stack.callback(source.close)
                trainers.append(stack.enter_context(Trainer(config, source, recording)))
                source.begin(trainers[-1].order.next_batch(0))
            chance = random.Random(1)
            found: list[list[tuple[float, float]]] = [[], []]
            for _ in range(WARM_TURNS + settings.rounds):
                for which in chance.sample((PLAIN, RECORDED), 2):
                    if which == RECORDED:
                        timeline.record_to(log)
                    found[which].append(
                        turn_of(trainers[which], settings.steps, timeline if which == RECORDED else None)
                    )
                    if which == RECORDED:
                        timeline.stop()
            plain, recorded = (trainer.weights() for trainer in trainers)
            if any(not plain[name].equal(recorded[name]) for name in plain):
                raise AssertionError("the weights with a timeline are not those without one")
    return [turns[WARM_TURNS:] for turns in found]


def render(report: Report, console: Console) -> None:
    settings = report.settings
    table = Table(
        title=f"a step with a timeline / without: {settings.data}, {settings.world} ranks, batches of "
        f"{settings.batch_size:,}, {settings.rounds} turns of {settings.steps} steps each"
    )
    for heading in ("", "median", "95 % interval"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for name, which in (("time", 0), ("processor time", 1)):
        middle, low, high = median_and_interval(report.ratios(which))
        table.add_row(name, f"{middle:.4f}", f"{low:.4f} to {high:.4f}")
    console.print(table)
