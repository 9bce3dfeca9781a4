# SPDX-License-Identifier: Apache-2.0
"""The `torch.distributed` backend over libsennit_core (runtime/backend/csrc/module.cpp)."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import final

from torch._C._distributed_c10d import Backend

from sennit.runtime.backend.process_group import Member

BUILT_FOR_TORCH: str
"""The torch release that this extension was compiled for; it fits no other."""

@final
class Options(Backend.Options): ...

@final
class SennitBackend(Backend):
    def __init__(
        self,
        *,
        member: Member,
        compile_plan: Callable[[int, int, int, int, int, bool, bool, bool, bool, int, tuple[int, ...]], bytes],
        shrink: Callable[[list[int], bool], Backend],
        timeout: timedelta,
        group_name: str,
        global_ranks: Sequence[int],
        plan_cache_bytes: int,
        is_coded: bool,
        staged_classes: Callable[[int], int],
    ) -> None:
        """`member` lives as long as the backend.

        `compile_plan` makes plans that the cache does not have. `shrink` makes the backend of a smaller group; its
        arguments are the ranks to exclude, and whether to abort operations in flight. `staged_classes` is asked once
        for a kind of collective. Bit k of its answer, for k from 1 to 62, says whether an alltoall of equal parts, an
        allgather or a reduce_scatter of 2**k bytes in all is not direct.
        """

    @property
    def options(self) -> Options: ...
    @property
    def member(self) -> Member: ...

class symmetric:
    """New CPU tensors in symmetric memory (runtime/backend/csrc/symmetric.hpp)."""

    @staticmethod
    def set_everywhere(on: bool) -> None: ...
    @staticmethod
    def begin() -> None: ...
    @staticmethod
    def end() -> None: ...
    @staticmethod
    def contains(address: int) -> bool: ...

class stand_in:
    """Treats host tensors as device tensors, for tests (runtime/backend/csrc/stand_in.hpp)."""

    @staticmethod
    def set_active(active: bool) -> bool: ...
    @staticmethod
    def delay_copies(seed: int, max_us: int) -> None: ...

def close_all() -> None:
    """Closes every open backend and releases Python objects. Called once, when the interpreter exits."""
