# SPDX-License-Identifier: Apache-2.0
"""The codec of a plan: what a plan must know of a `Codec` (codecs.py), which is all but the seed.

A post gives the seed, so a plan is compiled once and used with any.
"""

from __future__ import annotations

import math
from enum import IntEnum
from typing import Final

from sennit.transport.light_tuple import LightTuple


class CodecKind(IntEnum):
    """`sennit::CodecKind`: the formats, numbered as in plans."""

    FP16 = 0
    BF16 = 1
    FP8_E4M3 = 2
    FP8_E5M2 = 3
    INT8 = 4
    MX4 = 5
    LOSSLESS = 6


# The codecs whose codes have a fixed size: bytes of a block's scale, and bits of an element's code.
_LAYOUT: Final[dict[CodecKind, tuple[int, int]]] = {
    CodecKind.FP16: (0, 16), CodecKind.BF16: (0, 16), CodecKind.FP8_E4M3: (1, 8), CodecKind.FP8_E5M2: (1, 8),
    CodecKind.INT8: (4, 8), CodecKind.MX4: (1, 4),
}  # fmt: skip
# Ranges that are coded separately begin on cache lines of float32, and at the beginning of a block.
_LINE_ELEMENTS: Final = 16
_LONGEST_BLOCK: Final = 4096
# Elements whose planes of bytes LOSSLESS codes one by one.
LOSSLESS_BLOCK: Final = 8192


class Coding(LightTuple):
    """A codec without its seed."""

    kind: CodecKind
    block: int
    """Elements that share a scale; 0 where there is none."""
    stochastic: bool = False
    between_hosts: bool = False
    """Whether the collective codes only what goes between hosts: ranks of one host then exchange numbers as they
    are."""

    def coded_bytes(self, count: int, item_bytes: int = 4) -> int:
        """The bytes of `count` coded elements; of LOSSLESS, the most that those of `item_bytes` may take."""
        if self.kind is CodecKind.LOSSLESS:
            return item_bytes * (count + -(-count // LOSSLESS_BLOCK))
        scale_bytes, code_bits = _LAYOUT[self.kind]
        return -(-count // max(self.block, 1)) * scale_bytes + -(-count * code_bits // 8)

    @property
    def unit(self) -> int:
        """Ranges that are coded separately begin at multiples of this many elements."""
        lines = math.lcm(max(self.block, 1), _LINE_ELEMENTS)
        # With an odd block it may be very large.
        return lines if lines <= _LONGEST_BLOCK else self.block
