# SPDX-License-Identifier: Apache-2.0
"""Feeders and trainers: who sends which records when. docs/reference/ingest.md has the protocol."""
