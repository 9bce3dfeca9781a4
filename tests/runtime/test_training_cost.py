# SPDX-License-Identifier: Apache-2.0
"""Processor time and energy of a run."""

from __future__ import annotations

import os
from pathlib import Path

from sennit.runtime.training.cost import CostMeter


def write(powercap: Path, zone: str, energy: str, span: str = "999999") -> None:
    folder = powercap / zone
    folder.mkdir(exist_ok=True)
    (folder / "energy_uj").write_text(f"{energy}\n")
    (folder / "max_energy_range_uj").write_text(f"{span}\n")


def test_processor_time_is_that_of_this_process(tmp_path: Path) -> None:
    meter, before = CostMeter(tmp_path), os.times()
    while os.times().user + os.times().system - before.user - before.system < 0.05:
        pass
    cost = meter.read()
    assert cost.user_s + cost.system_s >= 0.05
    assert cost.machine
    assert cost.machine_joules is None


def test_energy_is_that_of_all_packages_and_counters_begin_again(tmp_path: Path) -> None:
    write(tmp_path, "intel-rapl:0", "100")
    write(tmp_path, "intel-rapl:1", "999000")
    # A part of a package, which the package counts.
    write(tmp_path, "intel-rapl:0:0", "50")
    meter = CostMeter(tmp_path)
    write(tmp_path, "intel-rapl:0", "2100")
    write(tmp_path, "intel-rapl:1", "500")
    write(tmp_path, "intel-rapl:0:0", "60")
    assert meter.read().machine_joules == (2000 + 1500) * 1e-6


def test_energy_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    write(tmp_path, "intel-rapl:0", "?")
    assert CostMeter(tmp_path).read().machine_joules is None
    write(tmp_path, "intel-rapl:0", "5")
    meter = CostMeter(tmp_path)
    write(tmp_path, "intel-rapl:1", "5")
    assert meter.read().machine_joules is None
