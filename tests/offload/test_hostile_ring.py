# SPDX-License-Identifier: Apache-2.0
"""A process that writes nonsense into its ring, as one without rights may: the kernel's program does bounded work."""

from __future__ import annotations

import numpy as np
import pytest

from sennit.offload.batches import BatchLayout
from sennit.offload.columns import Ragged
from sennit.offload.plan import FeaturePlan, Sparse
from sennit.offload.records import Rows, encode_packets, encode_records
from sennit.offload.schema import Ids, Schema
from sennit.offload.sketch import SketchShape
from sennit.offload.xdp import XdpReceiver

pytestmark = [pytest.mark.root, pytest.mark.needs("bpf", "arena")]
# The session is not that of the tests that may run at the same time: a session names the folder of pinned maps.
SESSION, ROWS, LENGTH = 92, 8, 3
PLAN = FeaturePlan(
    schema=Schema(ids=(Ids(name="near", length=LENGTH, is_list=True), Ids(name="far", length=LENGTH, is_list=True))),
    sparse=(Sparse(column="near"), Sparse(column="far")),
)
LAYOUT = BatchLayout(plan=PLAN, batch_rows=ROWS, slots=1)
HUGE = 0x7FFFFFFF


def test_a_length_that_is_overwritten_does_not_make_the_kernel_count_for_long() -> None:
    """The cursor of the second list points at the lengths of the first. So an id of a packet takes a length's place."""
    one_id = Ragged(np.ones(ROWS, np.int32), np.full(ROWS, HUGE, np.int64))
    rows = Rows(labels=np.zeros(ROWS, np.float32), columns={"near": one_id, "far": one_id})
    (packet,) = encode_packets(
        PLAN.schema, encode_records(PLAN.schema, rows), session=SESSION, batch=0, body_max_bytes=1400
    )
    shape = SketchShape(width=16, depth=1, one_row_in=1)
    with XdpReceiver(LAYOUT, session=SESSION, udp_port=4800, sketch=shape) as receiver:
        away = LAYOUT.lengths_offset - LAYOUT.values_offsets[1]
        LAYOUT.cursor_values(receiver.memory, 0)[1] = away // 8 % (1 << 64)
        receiver.deliver(packet)
        assert receiver.rows_taken(0) == ROWS
        assert LAYOUT.lengths(receiver.memory, 0)[0, 0] == HUGE, "the length is overwritten"
        sketch = receiver.sketch()
    assert sketch is not None
    assert sketch.counts[0].sum() <= ROWS * LENGTH
