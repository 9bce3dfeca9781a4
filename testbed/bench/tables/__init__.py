# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of embedding tables on one rank: kernels, tiers of memory."""
