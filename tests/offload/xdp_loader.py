# SPDX-License-Identifier: Apache-2.0
"""Receives at an interface by XDP as a rank does, with the capabilities that it is left: `xdp_loader.py INTERFACE`."""

from __future__ import annotations

import sys

from sennit.offload.batches import BatchLayout
from sennit.offload.dispatcher import Dispatcher
from sennit.offload.operators import SigridHash
from sennit.offload.plan import FeaturePlan, Sparse
from sennit.offload.schema import Ids, Schema
from sennit.offload.targets import xdp_receiver

PLAN = FeaturePlan(
    schema=Schema(dense=(), ids=(Ids(name="seen", length=9, is_list=True),)),
    columns={"hashed": SigridHash(column="seen", salt=1, max_value=1000)},
    dense=(),
    sparse=(Sparse(column="hashed", rows=1000),),
)
# The session is not that of test_xdp.py, which may run at the same time: a session names the folder of pinned maps.
with xdp_receiver()(BatchLayout(plan=PLAN, batch_rows=16, slots=2), session=78, udp_port=4800) as receiver:
    receiver.attach(sys.argv[1])
# Of ranks that share the interface.
with Dispatcher(first_port=4800, receivers=1) as dispatcher:
    dispatcher.attach(sys.argv[1])
print("attached")
