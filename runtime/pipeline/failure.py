# SPDX-License-Identifier: Apache-2.0
"""What the failure of a group that only a thread uses means for the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from sennit.runtime.backend import torch_versions
from sennit.runtime.backend.process_group import failure_of
from sennit.transport.errors import PeerError

Result = TypeVar("Result")


def explained(function: Callable[..., Result], group: dist.ProcessGroup | None) -> Callable[..., Result]:
    """Raises `PeerError` in place of what `function` raises if its `group` has failed.

    The default group has not failed then, but it cannot go on without the rank that this group misses.
    """

    def call(*arguments: object) -> Result:
        try:
            return function(*arguments)
        except Exception as error:
            if group is not None and (reason := failure_of(group)):
                raise PeerError(reason) from error
            raise

    return call


def abort(group: dist.ProcessGroup) -> None:
    """Lets everyone who waits in this group, here and on other ranks, go on with an error."""
    torch_versions.abort(group)
