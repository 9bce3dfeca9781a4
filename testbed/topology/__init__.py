# SPDX-License-Identifier: Apache-2.0
"""Hosts and planes on one machine: network namespaces, and a switch that impairs their packets from a seed.

The switch loses, marks, duplicates, corrupts, reorders, delays and rate-limits. docs/how-to/testbed.md shows the
topology and says what is exact.
"""

from sennit.testbed.topology.capture import Capture
from sennit.testbed.topology.impairment import Draw, Impairment, ImpairmentCounters, dice
from sennit.testbed.topology.planes import Planes
from sennit.testbed.topology.rate_limit import Direction, QueueCounters
from sennit.testbed.topology.relay_table import RelayCounters
from sennit.testbed.topology.switch import Impairer

__all__ = [
    "Capture",
    "Direction",
    "Draw",
    "Impairer",
    "Impairment",
    "ImpairmentCounters",
    "Planes",
    "QueueCounters",
    "RelayCounters",
    "dice",
]
