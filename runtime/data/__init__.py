# SPDX-License-Identifier: Apache-2.0
"""Data sets for the trainer: sources, encoding, and batches in the combined format."""
