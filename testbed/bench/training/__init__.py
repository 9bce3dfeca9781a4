# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of training steps: sharded tables, scaling, overlap, cost, quality, the planner."""
