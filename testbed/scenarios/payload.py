# SPDX-License-Identifier: Apache-2.0
"""What a workload sends, and the check of every byte that comes back.

Every repetition sends different bytes (the same random numbers, rotated), so that a late packet of the previous
repetition cannot pass as correct. Each rank can compute all ranks' inputs, and so the expected result.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from sennit.testbed.scenarios.model import ELEMENT_BYTES, Operation
from sennit.transport.algorithms.exchange_coded import RANK_SHIFT
from sennit.transport.codecs import COLLECTIVE_CODECS, Codec
from sennit.transport.oracle import codec_reference
from sennit.transport.plans.tree import balanced, leaves_of

Floats: TypeAlias = npt.NDArray[np.float32]

# Elements by which a repetition is rotated against the previous one: odd, and longer than a cache line.
ROTATION_ELEMENTS: Final = 131


def random_input(seed: int, rank: int, elements: int) -> Floats:
    """Values between -0.5 and 0.5, so that rounding of sums depends on their order."""
    return np.random.default_rng([seed, rank]).random(elements, np.float32) - np.float32(0.5)


def expected_sum(seed: int, world: int, elements: int) -> Floats:
    """The sum of all ranks' inputs."""
    return summed(random_input(seed, peer, elements) for peer in range(world))


def summed(leaves: Iterable[Floats]) -> Floats:
    """The sum over the tree that the transport promises (docs/reference/plans.md)."""
    rows = list(leaves)
    stack: list[Floats] = []
    for row, combinations in zip(rows, balanced(len(rows)), strict=True):
        stack.append(row)
        for _ in range(combinations):
            right = stack.pop()
            stack[-1] = stack[-1] + right
    return stack[0]


def recoded(codec: Codec, values: Floats, first_index: int) -> Floats:
    """The values after coding and decoding, by the reference in NumPy."""
    coded = codec_reference.encode(codec, values.view(np.uint8), first_index=first_index)
    return codec_reference.decode(codec, coded, values.size).view(np.float32)


class Payload:
    """The buffers of one rank, as blocks by rank. In AllReduce without leaves `given` and `got` are one array."""

    def __init__(
        self,
        operation: Operation,
        *,
        rank: int,
        world: int,
        size_bytes: int,
        seed: int,
        leaves: int | None = None,
        scattered: bool = False,
        codec: str | None = None,
    ) -> None:
        self.operation = operation
        self.codec = None if codec is None else Codec(kind=COLLECTIVE_CODECS[codec], stochastic=True, seed=seed)
        self._seed, self._rank, self._world = seed, rank, world
        self.leaves = leaves
        self.scattered = scattered
        self.elements = size_bytes // ELEMENT_BYTES // world * world
        part = self.elements // world
        match operation:
            case Operation.ALLREDUCE if leaves is not None:
                # The leaves are equal in worlds of any size.
                self.elements = size_bytes // ELEMENT_BYTES
                span = leaves_of(rank, world, leaves)
                rows = [random_input(seed, leaf, self.elements) for leaf in range(*span)]
                self._base = np.concatenate(rows).reshape(len(rows), -1)
                self._expected = expected_sum(seed, leaves, self.elements).reshape(1, -1)
                self.given, self.got = np.zeros(self._base.size, np.float32), np.zeros(self.elements, np.float32)
            case Operation.ALLREDUCE:
                self._base = random_input(seed, rank, self.elements).reshape(1, -1)
                self._expected = expected_sum(seed, world, self.elements).reshape(1, -1)
                # One more element carries rank 0's signal that this repetition is the last.
                self.got = self.given = np.zeros(self.elements + 1, np.float32)
            case Operation.ALLTOALL:
                self._base = random_input(seed, rank, self.elements).reshape(world, part)
                blocks = [random_input(seed, peer, self.elements).reshape(world, part)[rank] for peer in range(world)]
                self._expected = np.stack(blocks)
                self.given, self.got = np.zeros(self.elements, np.float32), np.zeros(self.elements, np.float32)
            case Operation.INCAST:
                self._base = random_input(seed, rank, self.elements).reshape(1, -1)
                receives = world if rank == 0 else 0
                blocks = [random_input(seed, peer, self.elements) for peer in range(receives)]
                self._expected = np.stack(blocks) if blocks else np.zeros((0, self.elements), np.float32)
                self.given = np.zeros(self.elements, np.float32)
                self.got = np.zeros(receives * self.elements, np.float32)

    def fill(self, repetition: int, *, last: bool) -> None:
        """Prepares a repetition. In AllReduce without leaves, rank 0 sets `last`."""
        in_place = self.got is self.given
        if not in_place:
            self.got.fill(np.nan)
        given = self.given[: self._base.size].reshape(self._base.shape)
        turn = self._turn(repetition, self._base.shape[1])
        given[:, : given.shape[1] - turn] = self._base[:, turn:]
        given[:, given.shape[1] - turn :] = self._base[:, :turn]
        if in_place:
            self.given[-1] = last

    def was_last(self) -> bool:
        """Reads rank 0's signal after a repetition."""
        return bool(self.got[-1] != 0)

    def wrong_elements(self, repetition: int) -> int:
        """Elements of the result that differ in any bit from the expected ones."""
        got = self.got[: self._expected.size].reshape(self._expected.shape).view(np.uint32)
        if self.codec is not None:
            return int((got != self._coded(self.codec, repetition).reshape(got.shape).view(np.uint32)).sum())
        expected = self._expected.view(np.uint32)
        turn = self._turn(repetition, expected.shape[1])
        split = expected.shape[1] - turn
        if np.array_equal(got[:, :split], expected[:, turn:]) and np.array_equal(got[:, split:], expected[:, :turn]):
            return 0
        return int((got != np.roll(expected, -turn, axis=1)).sum())

    def digest(self) -> str:
        """SHA-256 of the result's bytes."""
        return hashlib.sha256(self.got[: self._expected.size].view(np.uint8).data).hexdigest()

    def _coded(self, codec: Codec, repetition: int) -> Floats:
        """What the definitions say (docs/reference/plans.md, "Codecs"). Codes of rotated numbers are others."""
        turn = self._turn(repetition, self._base.shape[1])
        if self.leaves is None:
            part, found = self.elements // self._world, []
            for peer in range(self._world):
                block = random_input(self._seed, peer, self.elements).reshape(self._world, part)[self._rank]
                found.append(recoded(codec, np.roll(block, -turn), (peer << RANK_SHIFT) + self._rank * part))
            return np.concatenate(found)
        rows = [np.roll(random_input(self._seed, leaf, self.elements), -turn) for leaf in range(self.leaves)]
        total = summed([recoded(codec, row, leaf * self.elements) for leaf, row in enumerate(rows)])
        return recoded(codec, total, self.leaves * self.elements)

    @staticmethod
    def _turn(repetition: int, elements: int) -> int:
        return repetition * ROTATION_ELEMENTS % elements
