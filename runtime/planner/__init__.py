# SPDX-License-Identifier: Apache-2.0
"""Predicts the time of a training step with any placement of shards, and searches for a good one (docs/how-to/plan.md).

Constants are measured (`sennit calibrate`), rows are weighted by how often data uses them. No placement changes a bit.
"""
