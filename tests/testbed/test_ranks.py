# SPDX-License-Identifier: Apache-2.0
"""The conductor and its ranks on loopback: answers, faults fired while it waits, and ranks that fail or die."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

pytest.importorskip("pyroute2", reason="the extra `testbed` is not installed")

from sennit.testbed.scenarios import fault_timeline as timeline
from sennit.testbed.scenarios import measures
from sennit.testbed.scenarios.model import Library, Variant
from sennit.testbed.scenarios.ranks import Event, RankError, Ranks
from sennit.testbed.scenarios.stage import Run
from sennit.testbed.topology import Planes

pytestmark = pytest.mark.needs("core", "rails")
TIMEOUT_S = 30.0


class Loopback:
    """The part of `Planes` that `Ranks` needs, without namespaces."""

    def interfaces(self, host: int) -> list[str]:
        return ["lo"]

    def popen(self, host: int, command: list[str], **popen_args: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, **popen_args)


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    with Ranks(
        cast(Planes, Loopback()),
        library=Library.SENNIT,
        world=3,
        variant=Variant(paths=2),
        timeout_s=TIMEOUT_S,
        folder=tmp_path,
    ) as crew:
        yield crew


def prepare(ranks: Ranks, operation: str, seed: int) -> None:
    command = {"do": "prepare", "operation": operation, "size_bytes": 1 << 18, "seed": seed}
    ranks.ask(command, timeout_s=TIMEOUT_S)


def repeat(repetitions: int = 1, duration_s: float = 0.0, timeline: bool = False) -> dict[str, Any]:
    return {"do": "run", "repetitions": repetitions, "duration_s": duration_s, "timeline": timeline}


def test_results_are_right_and_timed(ranks: Ranks, seed: int) -> None:
    for operation in ("allreduce", "alltoall", "incast"):
        prepare(ranks, operation, seed)
        answers = ranks.ask(repeat(3), timeout_s=TIMEOUT_S)
        assert [answer["wrong_elements"] for answer in answers] == [[0, 0, 0]] * 3, operation
        assert all(answer["received_bytes"]["lo"] > 1 << 18 for answer in answers), operation
        seen = Run(
            library=Library.SENNIT, disturbed=False, variant=Variant(), round=0, answers=answers, events=[],
            impairment_counters={}, queue_counters={}, rank_counters=[],
        )  # fmt: skip
        assert len(measures.repetition_times_s(seen)) == 3
        assert min(measures.repetition_times_s(seen)) > 0
    ranks.stop()


def test_ranks_stop_together_after_a_duration_and_leave_a_timeline(ranks: Ranks, seed: int) -> None:
    prepare(ranks, "allreduce", seed)
    answers = ranks.ask(repeat(duration_s=0.2, timeline=True), timeout_s=TIMEOUT_S)
    counts = {len(answer["ends_s"]) for answer in answers}
    assert len(counts) == 1
    seen = Run(
        library=Library.SENNIT, disturbed=False, variant=Variant(), round=0, answers=answers, events=[],
        impairment_counters={}, queue_counters={}, rank_counters=[],
    )  # fmt: skip
    # The samples cover every result, except perhaps those of the first and last milliseconds.
    assert timeline.progress_times_s(seen)
    received = sum(answer["samples"][-1][1] - answer["samples"][0][1] for answer in answers)
    assert 0 < received <= counts.pop() * 3 * 3 * (1 << 18)


def test_ranks_run_under_their_variant(tmp_path: Path) -> None:
    """Otherwise all variants of a scenario would be equal, and always agree."""
    variant = Variant(transport="shm", paths=3)
    planes = cast(Planes, Loopback())
    with Ranks(planes, library=Library.SENNIT, world=2, variant=variant, timeout_s=TIMEOUT_S, folder=tmp_path) as crew:
        for pid in crew._pids:
            given = set(Path(f"/proc/{pid}/environ").read_text().split("\0"))
            assert {"SENNIT_TRANSPORT=shm", "SENNIT_PATHS=3", f"SENNIT_TIMEOUT_S={TIMEOUT_S}"} <= given
        prepare(crew, "allreduce", seed=1)
        crew.ask(repeat(), timeout_s=TIMEOUT_S)
        counters = [answer["counters"] for answer in crew.ask({"do": "counters"}, timeout_s=TIMEOUT_S)]
        assert all(counter["shm_bytes_received"] > 0 for counter in counters)
        crew.stop()


def test_survivors_of_a_killed_rank_name_it_and_go_on(ranks: Ranks, seed: int) -> None:
    prepare(ranks, "allreduce", seed)
    kill = Event(0.05, "rank 1 killed", lambda: ranks.kill(1))
    answers = ranks.ask(repeat(duration_s=TIMEOUT_S), timeout_s=TIMEOUT_S, events=[kill], silent={1})
    assert [name for name, _ in ranks.happened] == ["rank 1 killed"]
    assert answers[1] == {}
    for rank in (0, 2):
        assert answers[rank]["error"]["lost_ranks"] == [1]
        assert "rank 1" in answers[rank]["error"]["message"]
        assert answers[rank]["error"]["at_s"] > ranks.happened[0][1]
    moved = ranks.ask({"do": "reconfigure", "timeout_s": TIMEOUT_S}, timeout_s=TIMEOUT_S, silent={1})
    assert [(answer.get("rank"), answer.get("world")) for answer in moved] == [(0, 2), (None, None), (1, 2)]


def test_a_rank_that_fails_is_named_with_what_it_said(ranks: Ranks) -> None:
    with pytest.raises(RankError, match=r"sennit rank (\d) RuntimeError: rank \1 has no payload"):
        ranks.ask(repeat(), timeout_s=TIMEOUT_S)


def test_a_rank_that_dies_or_is_silent_unexpectedly_is_named(ranks: Ranks, seed: int) -> None:
    ranks.suspend(2)
    with pytest.raises(RankError, match=r"sennit rank 2 gave no answer to counters in 2 s"):
        ranks.ask({"do": "counters"}, timeout_s=2.0)
    ranks.kill(2)
    with pytest.raises(RankError, match=r"sennit rank 2 (ended at|had ended with status -9 before) counters"):
        ranks.ask({"do": "counters"}, timeout_s=TIMEOUT_S)
