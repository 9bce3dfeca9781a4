# SPDX-License-Identifier: Apache-2.0
"""Two processors: one takes packets, replays and late duplicates, the other reads the batches and releases them.

What the model of offload/csrc/tests/test_feed_slot.cpp tries step by step, in the kernel's own program at full speed.
"""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
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
SPINS = 200
# Two million batches in parts: on a busy machine reader and replayer wait for their processors at every few batches.
BATCHES = 20_000
PARTS = [0, *(pytest.param(part, marks=pytest.mark.long) for part in range(1, 101))]


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


@pytest.mark.parametrize("part", PARTS)
def test_no_row_of_another_batch_is_handed_out_while_packets_are_replayed(
    cpus: list[int], seed: int, part: int
) -> None:
    wanted = [replayer.expected(batch) for batch in range(replayer.CONTENTS)]
    wrong = 0
    with (
        XdpReceiver(replayer.LAYOUT, session=replayer.SESSION, udp_port=replayer.PORT, sketch=None) as receiver,
        replaying(receiver, cpus[1], seed + part) as words,
    ):
        for place in range(BATCHES):
            batch = replayer.number(place)
            wait_for(receiver, batch)
            wrong += content(receiver.batch(batch)) != wanted[batch % replayer.CONTENTS]
            receiver.release(batch)
            words[replayer.RELEASED] = place + 1
        counted = receiver.counters()
    assert wrong == 0
    taken = counted.records - counted.filtered
    assert replayer.ROWS * BATCHES <= taken <= replayer.ROWS * (BATCHES + replayer.SLOTS)
    # The replayer may get little of its processor.
    assert counted.datagrams[Verdict.DUPLICATE] > BATCHES // 100
    print(
        f"{BATCHES} batches, {counted.datagrams[Verdict.DUPLICATE]} duplicates, {counted.datagrams[Verdict.BUSY]} busy"
    )


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


def wait_for(receiver: XdpReceiver, batch: int) -> None:
    deadline_s = 0.0
    for _ in range(SPINS):
        if receiver.rows_taken(batch) == replayer.ROWS:
            return
    while receiver.rows_taken(batch) < replayer.ROWS:
        os.sched_yield()
        now_s = time.monotonic()
        deadline_s = deadline_s or now_s + DEADLINE_S
        assert now_s < deadline_s, f"batch {batch} has {receiver.rows_taken(batch)} rows: {receiver.counters()}"


def content(batch: Batch) -> tuple[bytes, ...]:
    columns: list[NDArray[Any]] = [batch.labels, batch.dense, batch.lengths, *batch.values]
    return tuple(column.tobytes() for column in columns)
