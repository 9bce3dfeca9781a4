# SPDX-License-Identifier: Apache-2.0
"""Preprocessing of samples: a `schema` says what a record holds, a `plan` what is computed, and a target computes it.

`targets.compile_plan` makes a receiver that turns datagrams into batches. It is `host_receiver` with `reference` or
`native`, or `xdp`, which runs the plan in the kernel. docs/reference/feature-plans.md has the operators,
docs/reference/records.md the bytes.

`ingest` brings the records of feeders to the ranks of a run.
"""
