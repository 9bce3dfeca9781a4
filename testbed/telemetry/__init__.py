# SPDX-License-Identifier: Apache-2.0
"""Shows the counters of this machine's ranks: `sennit top` for people, OpenMetrics for Prometheus."""
