# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of what comes before training: feeding, ingest, offload."""
