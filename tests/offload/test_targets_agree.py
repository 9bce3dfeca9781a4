# SPDX-License-Identifier: Apache-2.0
"""Random plans and records: every target makes of them exactly what the reference makes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st

from sennit.offload.admission import Verdict
from sennit.offload.batches import BatchLayout
from sennit.offload.numpy_receiver import NumpyReceiver
from sennit.offload.plan import Plan
from sennit.offload.records import encode_packets, encode_records
from sennit.offload.split import split
from sennit.offload.xdp import XdpReceiver
from tests.offload.agreement import assert_same_batch
from tests.offload.strategies import plans, random_rows

SESSION = 0x5E55104
BATCH_ROWS = 24


def packets_of(plan: Plan, seed: int) -> list[bytes]:
    """Two batches in packets of different sizes, with some mangled ones between."""
    rng = np.random.default_rng(seed)
    found: list[bytes] = []
    for batch in (0, 1):
        records = encode_records(plan.schema, random_rows(plan.schema, BATCH_ROWS, rng))
        longest = max(len(record) for record in records)
        good = encode_packets(
            plan.schema, records, session=SESSION, batch=batch, body_max_bytes=max(longest, int(rng.integers(50, 1400)))
        )
        for packet in good:
            if rng.random() < 0.3:
                found.append(mangled(packet, rng))
            found.append(packet)
            if rng.random() < 0.1:
                found.append(packet)
    return found


def mangled(packet: bytes, rng: np.random.Generator) -> bytes:
    """Cut, lengthened, or with a wrong byte in the header; or in the body, which only a length in it can show."""
    kind = rng.integers(0, 4)
    if kind == 0:
        return packet[: int(rng.integers(1, len(packet)))]
    if kind == 1:
        return packet + rng.bytes(int(rng.integers(1, 9)))
    end = 24 if kind == 2 else len(packet)
    at = int(rng.integers(0, end))
    return packet[:at] + bytes([packet[at] ^ int(rng.integers(1, 256))]) + packet[at + 1 :]


@pytest.mark.root
@pytest.mark.needs("bpf", "arena")
@pytest.mark.timeout(300)
# Without shrinking: each example compiles a program.
@settings(
    max_examples=40, phases=[Phase.generate], suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(plan=plans(), content=st.integers(0, 1 << 32))
def test_xdp_agrees_with_numpy(plan: Plan, content: int) -> None:
    plan = split(plan).prefix  # what XDP cannot do, it does not have to
    layout = BatchLayout(plan=plan, batch_rows=BATCH_ROWS, slots=2)
    with (
        NumpyReceiver(layout, session=SESSION) as expected,
        XdpReceiver(layout, session=SESSION, udp_port=4800) as found,
    ):
        for packet in packets_of(plan, content):
            expected.deliver(packet)
            found.deliver(packet)
        assert found.counters() == expected.counters()
        for verdict, count in expected.counters().datagrams.items():
            if count:
                event(verdict.name)
        assert expected.counters().datagrams[Verdict.ACCEPTED] > 0
        for batch in (0, 1):
            assert found.rows_taken(batch) == expected.rows_taken(batch)
            assert_same_batch(found.batch(batch), expected.batch(batch))
