# SPDX-License-Identifier: Apache-2.0
"""How many packets of a batch may be on the way: as many as the rank allows, fewer where they get lost.

Additive increase, multiplicative decrease (Chiu and Jain 1989; RFC 5681 section 3.1): halved when the rank wants rows
again, one packet more for each window of packets taken.
"""

from __future__ import annotations

import copy
from typing import Final

# With a single packet a second loss in a row could not be told from the first.
LEAST_PACKETS: Final = 2


class Window:
    """Of one batch. The first begins with the most: the rank has chosen what its own end holds, and most links hold
    more than that.
    """

    def __init__(self, most_packets: int) -> None:
        self._most = self._packets = float(most_packets)

    def following(self) -> Window:
        """Of a batch that goes the same way after this one."""
        return copy.copy(self)

    @property
    def packets(self) -> int:
        return int(self._packets)

    def lost(self) -> None:
        self._packets = min(self._most, max(LEAST_PACKETS, self._packets / 2))

    def taken(self, packets: int) -> None:
        self._packets = min(self._most, self._packets + packets / self._packets)
