# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of the transport: collectives and libraries that do the same, groups, codecs, RDMA."""
