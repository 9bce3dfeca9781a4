# SPDX-License-Identifier: Apache-2.0
"""Tiers of embedding tables: rows on a file or in DRAM, behind a cache (docs/reference/embedding-store.md)."""
