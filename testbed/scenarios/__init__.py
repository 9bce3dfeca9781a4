# SPDX-License-Identifier: Apache-2.0
"""Scenarios of the testbed, for `sennit testbed list|run|report`.

model       a scenario as data: topology, impairment, faults, workload, goals
catalogue   all scenarios
rank        one rank's process: `libraries` run the collectives, `payload` checks every byte, `sampler` records progress
ranks       the conductor's end of those processes
stage       one case from set-up to observations, with its faults; `hostile` sends junk
measures    numbers from observations; `fault_timeline` makes those around a fault
results     numbers against goals (passed, failed or unsupported), and all cases of one run as JSON
report_page the HTML report, with `plots`
"""
