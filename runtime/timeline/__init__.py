# SPDX-License-Identifier: Apache-2.0
"""When each rank did what in a step: recorded while it trains, written for Perfetto, read for the critical path."""

from typing import TYPE_CHECKING

from sennit.exports import exporter

if TYPE_CHECKING:
    from sennit.runtime.timeline.timeline import Timeline as Timeline

__getattr__ = exporter(__name__, {"Timeline": "timeline"})
