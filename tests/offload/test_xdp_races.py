# SPDX-License-Identifier: Apache-2.0
"""Two processors fill the same slots, with packets, replays, late duplicates and malformed ones. The second one also
reads the batches and releases them.

What the model of offload/csrc/tests/test_feed_slot.cpp tries step by step, in the kernel's own program at full speed.
"""

from __future__ import annotations

import mmap
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from numpy.typing import NDArray

from sennit.offload.admission import Verdict
from sennit.offload.batches import Batch
from sennit.offload.xdp import XdpReceiver
from tests.offload import replayer

pytestmark = [pytest.mark.root, pytest.mark.needs("bpf", "arena")]
DEADLINE_S = 60.0
SPINS = 50
# Ten million batches in parts: on a busy machine reader and replayer wait for their processors at every few batches.
BATCHES, PARTS = 20_000, 500


@dataclass
class Tally:
    """What all parts of a run have counted."""

    batches: int = 0
    wrong: int = 0
    counted: Counter[Verdict] = field(default_factory=Counter)

    def __str__(self) -> str:
        named = {"duplicates": Verdict.DUPLICATE, "malformed": Verdict.MALFORMED, "busy": Verdict.BUSY}
        counts = ", ".join(f"{self.counted[verdict]:,} {name}" for name, verdict in named.items())
        return f"{self.batches:,} batches, {self.wrong} wrong; {counts}"


@pytest.fixture(scope="module")
def tally(request: pytest.FixtureRequest) -> Iterator[Tally]:
    """Says at the end what was counted. `make test-long` puts that line into its record."""
    made = Tally()
    yield made
    if made.batches > BATCHES:
        with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
            print(f"\n{made}")


@pytest.fixture
def cpus() -> Iterator[list[int]]:
    """Two processors. The test runs on the first one."""
    allowed = os.sched_getaffinity(0)
    if len(allowed) < 2:
        pytest.skip("this process may run on one processor only")
    found = sorted(allowed)[:2]
    os.sched_setaffinity(0, found[:1])
    yield found
    os.sched_setaffinity(0, allowed)


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.long) for part in range(1, PARTS))])
def test_no_row_of_another_batch_is_handed_out_while_two_processors_fill_it(
    cpus: list[int], seed: int, part: int, tally: Tally
) -> None:
    wanted = [replayer.expected(batch) for batch in range(replayer.CONTENTS)]
    wrong = 0
    with (
        XdpReceiver(replayer.LAYOUT, session=replayer.SESSION, udp_port=replayer.PORT, sketch=None) as receiver,
        replaying(receiver, cpus[1], seed + part) as words,
    ):
        second = SecondFeeder(receiver, seed + part)
        for place in range(BATCHES):
            batch = replayer.number(place)
            second.fill(place)
            wrong += content(receiver.batch(batch)) != wanted[batch % replayer.CONTENTS]
            receiver.release(batch)
            words[replayer.RELEASED] = place + 1
        counted = receiver.counters()
    tally.batches += BATCHES
    tally.wrong += wrong
    tally.counted.update(counted.datagrams)
    assert wrong == 0
    taken = counted.records - counted.filtered
    assert replayer.ROWS * BATCHES <= taken <= replayer.ROWS * (BATCHES + replayer.SLOTS)
    # The replayer may get little of its processor.
    for verdict, least in (
        (Verdict.DUPLICATE, BATCHES // 100),
        (Verdict.MALFORMED, BATCHES // 1000),
        (Verdict.BUSY, 1),
    ):
        assert counted.datagrams[verdict] >= least, (verdict.name, counted)


class SecondFeeder:
    """What the reader's processor does while a batch is not complete: it takes packets, too."""

    def __init__(self, receiver: XdpReceiver, seed: int) -> None:
        self._receiver = receiver
        self._packets = replayer.Packets()
        self._choice = random.Random(-seed)

    def fill(self, place: int) -> None:
        """Returns when the batch at this place is complete."""
        batch = replayer.number(place)
        deadline_s = 0.0
        for _ in range(SPINS):
            if self._receiver.rows_taken(batch) == replayer.ROWS:
                return
        while self._receiver.rows_taken(batch) < replayer.ROWS:
            self._take(place)
            now_s = time.monotonic()
            deadline_s = deadline_s or now_s + DEADLINE_S
            assert now_s < deadline_s, (
                f"batch {batch} has {self._receiver.rows_taken(batch)} rows: {self._receiver.counters()}"
            )

    def _take(self, place: int) -> None:
        """A malformed packet, the batch from its beginning as of a feeder that takes another one's place, one packet of
        a batch near it, or nothing."""
        batch, kind = replayer.number(place), self._choice.randrange(4)
        if kind == 0:
            # Of the row that is next, unless the other processor has taken that by then.
            packets = self._packets.malformed(batch)
            taken = self._receiver.rows_taken(batch)
            self._run(packets[min(taken * len(packets) // replayer.ROWS, len(packets) - 1)])
        elif kind == 1:
            for packet in self._packets.of(batch):
                self._run(packet)
        elif kind == 2:
            near = replayer.number(place + self._choice.choice(replayer.AROUND))
            self._run(self._choice.choice(self._packets.of(near)))
        else:
            os.sched_yield()

    def _run(self, packet: bytes) -> None:
        self._receiver.program.test_run(packet)


@contextmanager
def replaying(receiver: XdpReceiver, cpu: int, seed: int) -> Iterator[memoryview]:
    """Runs the replayer on a processor. Yields the words that it shares with the reader."""
    memory = os.memfd_create("replayer")
    program = receiver.program.descriptor
    for place in range(-replayer.SLOTS, 0):
        receiver.release(replayer.number(place))
    try:
        os.ftruncate(memory, mmap.PAGESIZE)
        words = memoryview(mmap.mmap(memory, mmap.PAGESIZE)).cast("Q")
        path = Path(replayer.__file__)
        command = [sys.executable, str(path), str(program), str(memory), str(cpu), str(seed)]
        with subprocess.Popen(command, pass_fds=(program, memory)) as child:
            try:
                yield words
                words[replayer.ENDS] = 1
                assert child.wait(DEADLINE_S) == 0
            finally:
                child.kill()
    finally:
        os.close(memory)


def content(batch: Batch) -> tuple[bytes, ...]:
    columns: list[NDArray[Any]] = [batch.labels, batch.dense, batch.lengths, *batch.values]
    return tuple(column.tobytes() for column in columns)
