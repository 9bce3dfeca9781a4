# SPDX-License-Identifier: Apache-2.0
"""What this machine can do, and what sennit does on it: capability probes, `sennit doctor`, benchmarks.

`capabilities` is the one probe module that tests and the doctor share, `bench` measures sennit beside its
peers in one run, `setup` prepares a machine for `make build`. What comes: topologies, impairments, the
soft-RoCE machine and reports.
"""
