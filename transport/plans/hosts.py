# SPDX-License-Identifier: Apache-2.0
"""Which ranks of a group share a host, for algorithms that send little between hosts."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cached_property
from itertools import groupby

from sennit.transport.plans.tree import Span


class Hosts(tuple[Span, ...]):
    """The ranks of each host. They follow one another, as launchers number them."""

    @property
    def spans(self) -> tuple[Span, ...]:
        """By host."""
        return self

    @classmethod
    def of(cls, names: Sequence[Hashable]) -> Hosts | None:
        """`names[r]` names the host of rank r. None if the ranks of a host do not follow one another."""
        spans: list[Span] = []
        for _, ranks in groupby(names):
            low = spans[-1].high if spans else 0
            spans.append(Span(low, low + len(list(ranks))))
        return cls(tuple(spans)) if len(spans) == len(set(names)) else None

    @classmethod
    def equal(cls, world: int, count: int) -> Hosts:
        """`count` hosts with nearly the same number of ranks."""
        return cls(tuple(Span(host * world // count, (host + 1) * world // count) for host in range(count)))

    @property
    def world(self) -> int:
        return self.spans[-1].high

    @property
    def ranks_each(self) -> int | None:
        """The ranks of each host; None if hosts have not equally many."""
        sizes = {span.high - span.low for span in self.spans}
        return sizes.pop() if len(sizes) == 1 else None

    @property
    def are_shared(self) -> bool:
        """Whether there are several hosts, and several ranks on one of them."""
        return 1 < len(self.spans) < self.world

    @cached_property
    def peers(self) -> tuple[int, int]:
        """How many ranks of the own host, and of others, a rank on the smallest host has for peers."""
        here = min(span.high - span.low for span in self.spans)
        return here - 1, self.world - here

    @cached_property
    def _numbers(self) -> tuple[int, ...]:
        return tuple(host for host, span in enumerate(self.spans) for _ in range(*span))

    def of_rank(self, rank: int) -> int:
        """The number of the rank's host."""
        return self._numbers[rank]

    def relay(self, host: int, rank: int) -> int:
        """The rank of `host` that stands for `rank`: itself, or on another host the one in its place."""
        span, home = self.spans[host], self.spans[self.of_rank(rank)]
        return span.low + (rank - home.low) % (span.high - span.low)

    def near_levels(self) -> int:
        """The levels of the tree, from the leaves up, at which the two halves of a node always share a host."""
        levels = range((self.world - 1).bit_length())
        return sum(all(span.low % (2 << level) == 0 for span in self.spans) for level in levels)
