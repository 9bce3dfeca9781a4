# SPDX-License-Identifier: Apache-2.0
"""Preprocessing of samples: a `schema` says what a record holds, a `plan` what becomes of it, and a target does it.

`targets.compile_plan` makes a receiver that turns datagrams into batches: `host_receiver` with `reference` or with
`native`, or `xdp`, which runs the plan in the kernel. docs/reference/feature-plans.md has the operators,
docs/reference/records.md the bytes.
"""
