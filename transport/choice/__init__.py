# SPDX-License-Identifier: Apache-2.0
"""Which algorithm runs: a cost model, its constants, what a codec costs."""
