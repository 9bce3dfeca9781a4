# SPDX-License-Identifier: Apache-2.0
"""Tiers of embedding tables: rows on a file or in DRAM, and a cache of them before that (docs/embedding-store.md)."""
