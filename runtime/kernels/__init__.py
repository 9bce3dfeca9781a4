# SPDX-License-Identifier: Apache-2.0
"""Embedding tables: one operator, several implementations, the same bits.

docs/reference/embedding.md defines the arithmetic.
"""
