# SPDX-License-Identifier: Apache-2.0
"""The exchanges of sharded tables: coded if a codec is given, and how many bytes they send."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from sennit.runtime.backend import communicator
from sennit.runtime.backend.gathering import all_gather_parts
from sennit.runtime.backend.symmetric import memory_for_peers
from sennit.runtime.sharded.phases import PhaseClock, phase
from sennit.transport.codecs import Codec as Codec
from sennit.transport.codecs import CodecKind

# The phase of each kind of exchange. All other kinds are input.
_PHASES: Final = {
    "sums": "AlltoAll forward",
    "rows": "AlltoAll forward",
    "gradients": "AlltoAll backward",
    "weight gradients": "AlltoAll backward",
}
_LARGEST_BLOCK: Final = 4_096


def row_codec(codec: Codec, widths: Iterable[int]) -> Codec:
    """The codec with blocks inside rows of these `widths`, so that what lies beside a row does not change its bits.

    A block of INT8 is a row if all widths are equal, else their greatest common divisor (4,096 elements at most). FP8
    has the greatest common divisor with its own block. Blocks of MX4 have 32 elements, whatever the widths.
    """
    width = math.gcd(*widths)
    if codec.kind in (CodecKind.FP8_E4M3, CodecKind.FP8_E5M2):
        width = math.gcd(width, codec.block or 0)
    elif codec.kind is not CodecKind.INT8:
        return codec
    block = next((size for size in range(min(width, _LARGEST_BLOCK), 0, -1) if width % size == 0), codec.block)
    return dataclasses.replace(codec, block=block)


class Wire:
    """AlltoAll and AllGather of flat tensors with counts, among the ranks of a group. A rank alone sends nothing."""

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        group: dist.ProcessGroup | None,
        codec: Codec | None = None,
        clock: PhaseClock | None = None,
    ) -> None:
        """`codec`: codes floats in AlltoAll, and LOSSLESS integers, too. It takes a group of backend sennit."""
        self._rank, self._world_size = rank, world_size
        self._usual_group, self._of_thread = group, threading.local()
        self._codec, self._clock = codec, clock
        self._lossless = codec if codec is not None and codec.kind is CodecKind.LOSSLESS else None
        self._coded_calls = 0
        self.sent_bytes: Counter[str] = Counter()
        """Bytes that this rank gave other ranks, by kind: "lengths", "ids", "rows", "gradients" and so on. They
        count as they were before LOSSLESS coded them."""

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The group of this thread's exchanges."""
        return getattr(self._of_thread, "group", None) or self._usual_group

    @contextlib.contextmanager
    def over(self, group: dist.ProcessGroup | None) -> Iterator[None]:
        """Inside, this thread's exchanges use `group`, and those of other threads do not wait for them."""
        self._of_thread.group = group
        try:
            yield
        finally:
            self._of_thread.group = None

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Counts time to a phase, if there is a clock."""
        return phase(self._clock, name)

    def codec_of(self, widths: Iterable[int]) -> Codec | None:
        """The codec for floats of rows of these widths."""
        return None if self._codec is None else row_codec(self._codec, widths)

    def all_to_all(
        self,
        kind: str,
        source: Tensor,
        receive: Sequence[int],
        send: Sequence[int],
        *,
        codec: Codec | None = None,
        even: bool = False,
    ) -> Tensor:
        """Sends `send[r]` elements of `source` to rank r. Returns `receive[r]` elements of each rank.

        `codec` (`codec_of`) codes and decodes all elements, also those that stay here. `even`: all ranks know that all
        parts have one size. Then no rank tells the others its sizes, and the transport may choose an algorithm for
        equal parts (docs/reference/plans.md).
        """
        codec = self._lossless if codec is None else codec
        if codec is None and self._world_size == 1:
            return source
        with self.phase(_PHASES.get(kind, "input exchange")):
            if codec is None:
                # The other ranks of this host write there themselves: one copy instead of two.
                with memory_for_peers(self.group):
                    output = source.new_empty(sum(receive))
                sizes = [None if even else list(counts) for counts in (receive, send)]
                dist.all_to_all_single(output, source, sizes[0], sizes[1], group=self.group)
            else:
                output = self._coded(source, receive, send, codec)
        others = [count for rank, count in enumerate(send) if rank != self._rank]
        if codec is None or codec.kind is CodecKind.LOSSLESS:
            self.sent_bytes[kind] += sum(others) * source.element_size()
        else:
            self.sent_bytes[kind] += sum(map(codec.coded_bytes, others))
        return output

    def _coded(self, source: Tensor, receive: Sequence[int], send: Sequence[int], codec: Codec) -> Tensor:
        """`all_to_all` with a codec, which works in host memory. Each call has its own seed for stochastic rounding."""
        seed = (codec.seed + self._coded_calls) % (1 << 64)
        self._coded_calls += 1
        received = communicator(self.group).alltoall(
            source.detach().cpu().numpy(),
            send_counts=send,
            recv_counts=receive,
            codec=dataclasses.replace(codec, seed=seed),
        )
        return torch.from_numpy(received).to(source.device)

    def all_gather(self, kind: str, own: Tensor, sizes: Sequence[int]) -> Tensor:
        """Returns the elements of all ranks, `sizes[r]` of rank r."""
        if self._world_size == 1:
            return own
        with self.phase("AllGather"):
            output = all_gather_parts(own, sizes, self.group)
        self.sent_bytes[kind] += own.nbytes * (self._world_size - 1)
        return output

    def largest_of(self, own: Tensor) -> Callable[[], Tensor]:
        """Begins to tell all ranks the elements of `own`, int64. Collective; other exchanges may follow.

        Returns a function that waits, and returns the largest of each over all ranks: of 0 and 1, whether any has 1.
        """
        found = own.clone()
        if self._world_size == 1:
            return lambda: found
        work = dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group, async_op=True)

        def wait() -> Tensor:
            assert work is not None
            work.wait()
            return found

        return wait
