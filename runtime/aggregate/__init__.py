# SPDX-License-Identifier: Apache-2.0
"""An aggregator on a machine of its own: `sennit aggregate` (`command`); docs/reference/aggregation.md."""
