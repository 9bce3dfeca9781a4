# SPDX-License-Identifier: Apache-2.0
"""Sends every batch as soon as it has a slot, and meanwhile repeats packets of batches around the one being read.

`replayer.py PROGRAM WORDS CPU SEED`: descriptors of the program and of the memory that it shares with the reader, the
processor to run on, and the seed of the order. The program runs on each packet here, as it runs where packets arrive.
"""

from __future__ import annotations

import mmap
import os
import random
import sys
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sennit.ebpf.trial import run_program
from sennit.offload._native import RecordSender
from sennit.offload.batches import BatchLayout
from sennit.offload.columns import Ragged
from sennit.offload.framing import frame
from sennit.offload.plan import FeaturePlan, Sparse
from sennit.offload.records import HEADER, Rows, encode_records, sealed
from sennit.offload.schema import Dense, Ids, Schema

SESSION: Final = 79
PORT: Final = 4800
ROWS: Final = 4
# So many that both processes get on while one of them waits for its processor.
SLOTS: Final = 16
# The first batch. Numbers wrap half way through the short form of the test.
FIRST: Final = (1 << 32) - 10_000
# Batches of different content. After them the first one's rows come again.
CONTENTS: Final = 512
# Packets that are repeated are of these batches, counted from the one that the reader waits for: released long ago,
# just released, being read, and being filled.
AROUND: Final = (-SLOTS, -2, -1, 0, 1)
REPEATS: Final = 2
BODY_MAX_BYTES: Final = 44  # one to three records
# Places in the shared memory: how many batches the reader has released, and whether the replayer is to end.
RELEASED, ENDS = 0, 1

SCHEMA: Final = Schema(dense=(Dense(name="age"),), ids=(Ids(name="user"), Ids(name="seen", length=3, is_list=True)))
PLAN: Final = FeaturePlan(schema=SCHEMA, dense=("age",), sparse=(Sparse(column="user"), Sparse(column="seen")))
LAYOUT: Final = BatchLayout(plan=PLAN, batch_rows=ROWS, slots=SLOTS)


def number(place: int) -> int:
    """The number of the batch at this place of the run."""
    return (FIRST + place) % (1 << 32)


def rows(first: int, end: int) -> Rows:
    """Rows `first` to `end` - 1 of all contents. No two are equal, and lists differ in length."""
    numbers = np.arange(first, end, dtype=np.int64)
    lengths = (numbers * 5 // 3 % 4).astype(np.int32)
    seen = np.repeat(numbers, lengths) * 7 + 1
    return Rows(
        labels=(numbers % 2).astype(np.float32),
        columns={
            "age": numbers.astype(np.float32),
            "user": Ragged(np.ones(len(numbers), np.int32), numbers + 10_000),
            "seen": Ragged(lengths, seen),
        },
    )


def expected(batch: int) -> tuple[bytes, ...]:
    """The columns of a batch: labels, dense numbers, lengths, and the ids of both tables."""
    first = batch % CONTENTS * ROWS
    found = rows(first, first + ROWS)
    user, seen = found.columns["user"], found.columns["seen"]
    assert isinstance(user, Ragged)
    assert isinstance(seen, Ragged)
    columns: list[NDArray[np.generic]] = [
        found.labels,
        np.asarray(found.columns["age"]),
        np.concatenate([user.lengths, seen.lengths]),
        user.values,
        seen.values,
    ]
    return tuple(column.tobytes() for column in columns)


class Packets:
    """The packets of batches, as frames for the program."""

    def __init__(self) -> None:
        records = encode_records(SCHEMA, rows(0, CONTENTS * ROWS))
        starts = np.cumsum([0, *map(len, records)]).astype(np.uint64)
        content = np.frombuffer(b"".join(records), np.uint8)
        self._sender = RecordSender(content, starts, 0, SCHEMA.schema_id, SESSION, BODY_MAX_BYTES)

    def of(self, batch: int) -> list[bytes]:
        """In the order of its rows."""
        return [frame(packet, PORT) for packet in self._datagrams(batch)]

    def malformed(self, batch: int) -> list[bytes]:
        """Those of a batch, each without its last byte: whole, and with lists that the program has written when it
        finds that the last record does not end with the packet."""
        found = []
        for packet in self._datagrams(batch):
            *begin, body_bytes, _ = HEADER.unpack_from(packet)
            head = HEADER.pack(*begin, body_bytes - 1, 0)
            found.append(frame(sealed(head + packet[HEADER.size : -1]), PORT))
        return found

    def _datagrams(self, batch: int) -> list[bytes]:
        first = batch % CONTENTS * ROWS
        return self._sender.packets(np.arange(first, first + ROWS), batch, 0)


def main(program: int, memory: int, cpu: int, seed: int) -> None:
    os.sched_setaffinity(0, [cpu])
    words = memoryview(mmap.mmap(memory, mmap.PAGESIZE)).cast("Q")
    packets = Packets()
    choice, parent = random.Random(seed), os.getppid()
    sent: dict[int, list[bytes]] = {}
    made = 0
    while not words[ENDS] and os.getppid() == parent:
        released = int(words[RELEASED])
        if made == released + SLOTS:
            os.sched_yield()
        while made < released + SLOTS:
            sent[made] = packets.of(number(made))
            for each in sent[made]:
                run_program(program, "feed", each)
            sent.pop(made - 3 * SLOTS, None)
            made += 1
        # One that found its slot busy is lost, and comes again here.
        for place in choice.choices(AROUND, k=REPEATS):
            if released + place >= 0:
                run_program(program, "feed", choice.choice(sent[released + place]))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
