# SPDX-License-Identifier: Apache-2.0
"""The number of packets of a batch that may be in flight: the rank's limit, less after losses.

Additive increase, multiplicative decrease (Chiu and Jain 1989; RFC 5681 section 3.1): the window is halved when the
rank asks for rows again, and grows by one packet for each window of packets taken.
"""

from __future__ import annotations

import copy
from typing import Final

# With a single packet, a second loss in a row could not be told from the first.
LEAST_PACKETS: Final = 2


class Window:
    """The window of one batch. The first batch starts at the limit: the rank chose what its end holds, and most links
    hold more than that.
    """

    def __init__(self, most_packets: int) -> None:
        self._most = self._packets = float(most_packets)

    def following(self) -> Window:
        """The window of the next batch on the same path."""
        return copy.copy(self)

    @property
    def packets(self) -> int:
        return int(self._packets)

    def lost(self) -> None:
        self._packets = min(self._most, max(LEAST_PACKETS, self._packets / 2))

    def taken(self, packets: int) -> None:
        self._packets = min(self._most, self._packets + packets / self._packets)
