# SPDX-License-Identifier: Apache-2.0
"""The `torch.distributed` backend over libsennit_core (runtime/backend/csrc/module.cpp)."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import final

from torch._C._distributed_c10d import Backend

BUILT_FOR_TORCH: str
"""The torch release that this extension was compiled for; it fits no other."""

@final
class Options(Backend.Options):
    @property
    def plan_cache_bytes(self) -> int: ...
    @property
    def stage_host_tensors(self) -> bool: ...

@final
class SennitBackend(Backend):
    def __init__(
        self,
        *,
        communicator: int,
        compile_plan: Callable[[int, int, int, int, int, bool, bool, bool, tuple[int, ...]], bytes],
        shrink: Callable[[list[int], bool], Backend],
        timeout: timedelta,
        group_name: str,
        global_ranks: Sequence[int],
        plan_cache_bytes: int,
        stage_host_tensors: bool,
    ) -> None:
        """`communicator` is a `sennit_comm*`; `compile_plan` makes the plans that the cache misses, `shrink` the
        backend of a smaller group (ranks to exclude, whether to abort what is in flight)."""

    @property
    def options(self) -> Options: ...
    @property
    def compile_plan(self) -> object: ...

def close_all() -> None:
    """Ends every backend that is still open and lets go of Python objects: once, at the interpreter's exit."""
