# SPDX-License-Identifier: Apache-2.0
"""The `torch.distributed` backend over libsennit_core (runtime/backend/csrc/module.cpp)."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import final

from torch._C._distributed_c10d import Backend

from sennit.transport.communicator import Communicator

BUILT_FOR_TORCH: str
"""The torch release that this extension was compiled for; it fits no other."""

@final
class Options(Backend.Options):
    @property
    def plan_cache_bytes(self) -> int: ...

@final
class SennitBackend(Backend):
    def __init__(
        self,
        *,
        communicator: Communicator,
        compile_plan: Callable[[int, int, int, int, int, bool, bool, bool, bool, tuple[int, ...]], bytes],
        shrink: Callable[[list[int], bool], Backend],
        timeout: timedelta,
        group_name: str,
        global_ranks: Sequence[int],
        plan_cache_bytes: int,
    ) -> None:
        """`communicator` lives as long as the backend; `compile_plan` makes the plans that the cache misses, `shrink`
        the backend of a smaller group (ranks to exclude, whether to abort what is in flight)."""

    @property
    def options(self) -> Options: ...
    @property
    def communicator(self) -> Communicator: ...

class stand_in:
    """Host tensors in the part of an accelerator's (runtime/backend/csrc/stand_in.hpp): for tests alone."""

    @staticmethod
    def set_active(active: bool) -> bool: ...
    @staticmethod
    def delay_copies(seed: int, max_yields: int) -> None: ...

def close_all() -> None:
    """Ends every backend that is still open and lets go of Python objects: once, at the interpreter's exit."""
