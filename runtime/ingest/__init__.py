# SPDX-License-Identifier: Apache-2.0
"""How samples come to the trainer: the order that a run defines, and where its batches are taken from."""
