# SPDX-License-Identifier: Apache-2.0
"""A trainer without rights: `leased_trainer.py AGENT INTERFACE PORT BATCHES`.

It says "ready", then the SHA-256 of all columns of its first batches, one a line, and ends when its input does, or when
the agent ends the lease.
"""

from __future__ import annotations

import hashlib
import os
import select
import sys
import time
from pathlib import Path

import numpy as np

from sennit.ebpf.kernel_features import effective_capabilities
from sennit.offload.agent.receiver import LeasedReceiver
from sennit.offload.batches import Batch, BatchLayout
from sennit.offload.errors import TargetUnavailable
from sennit.offload.operators import Clamp, SigridHash
from sennit.offload.plan import FeaturePlan, Sparse
from sennit.offload.schema import Dense, Ids, Schema

SESSION, ROWS, SLOTS = 91, 96, 2
DEADLINE_S, LOOK_S = 60.0, 0.05
PLAN = FeaturePlan(
    schema=Schema(dense=(Dense(name="age"),), ids=(Ids(name="user"), Ids(name="seen", length=20, is_list=True))),
    columns={
        "young": Clamp(column="age", low=0.0, high=1.0),
        "who": SigridHash(column="user", salt=2, max_value=1 << 20),
    },
    dense=("young",),
    sparse=(Sparse(column="who", rows=1 << 20), Sparse(column="seen")),
)
LAYOUT = BatchLayout(plan=PLAN, batch_rows=ROWS, slots=SLOTS)


def digest(batch: Batch) -> str:
    found = hashlib.sha256()
    for column in (batch.labels, batch.dense, batch.lengths, *batch.values):
        found.update(np.ascontiguousarray(column).tobytes())
    return found.hexdigest()


def main(agent: str, interface: str, port: int, batches: int) -> None:
    assert os.geteuid() != 0
    assert effective_capabilities() == 0
    try:
        with LeasedReceiver(LAYOUT, session=SESSION, interface=interface, udp_port=port, agent=Path(agent)) as receiver:
            if os.fork() == 0:  # has all descriptors, and outlives a trainer that is killed
                os.read(0, 1)
                os._exit(0)
            print("ready", flush=True)
            deadline_s = time.monotonic() + DEADLINE_S
            for number in range(batches):
                while receiver.rows_taken(number) < ROWS:
                    receiver.check()
                    assert time.monotonic() < deadline_s, receiver.counters()
                    time.sleep(0)
                print(digest(receiver.batch(number)), flush=True)
                receiver.release(number)
            print(receiver.counters().records, flush=True)
            while not select.select([0], [], [], LOOK_S)[0]:
                receiver.check()
    except TargetUnavailable as error:
        print(error, flush=True)
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
