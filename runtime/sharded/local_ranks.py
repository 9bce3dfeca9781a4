# SPDX-License-Identifier: Apache-2.0
"""How many ranks of a group share a host, for placements that keep a table inside one."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from sennit.runtime.backend.process_group import communicator_or_names
from sennit.transport.config import from_environment
from sennit.transport.meeting.host import host_identity
from sennit.transport.plans.hosts import Hosts


def local_ranks(group: dist.ProcessGroup | None = None) -> int | None:
    """The ranks of each host of the group, as `place` takes them: the same on all its ranks. Collective.

    None if all count as one host: where hosts have not equally many ranks, or ranks that do not follow one another.
    Hosts are told apart by SENNIT_HOST_ID, or by the kernel. Ranks of one host that reach each other over UDP share it.
    """
    found = communicator_or_names(group)
    if isinstance(found, list):
        names: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(names, host_identity(from_environment().host_id), group=group)
    else:
        names = list(found.host_names)
    hosts = Hosts.of(names)
    return None if hosts is None else hosts.ranks_each
