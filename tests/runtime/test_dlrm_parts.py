# SPDX-License-Identifier: Apache-2.0
"""The parts of the trainer that need no process group, each against a plain reference."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from sennit.runtime.checkpoint.digest import line
from sennit.runtime.data.seeds import numpy_stream
from sennit.runtime.kernels import Optimizer, OptimizerSpec
from sennit.runtime.model.factory import dense_optimizer
from sennit.runtime.sharded.memory_limits import shared_limits
from sennit.runtime.sharded.phases import PhaseClock
from sennit.runtime.training.config import TrainingConfig
from sennit.runtime.training.predictions import quality
from sennit.transport._core import available_bytes
from sennit.transport.errors import ConfigError


def test_memory_of_a_host_is_shared_by_its_ranks() -> None:
    told = [("a", None, 1000), ("b", None, 5000), ("a", None, 900), ("a", 77, 950)]
    assert shared_limits(told) == [270, 4500, 270, 77]


def test_available_memory_is_what_the_kernel_and_the_control_groups_leave(tmp_path: Path) -> None:
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    inner = cgroup / "job" / "rank"
    for folder in (proc / "self", inner):
        folder.mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal:  900 kB\nMemAvailable:   800 kB\n")
    (proc / "self" / "cgroup").write_text("0::/job/rank\n")
    assert available_bytes(str(proc), str(cgroup)) == 800 << 10
    (inner / "memory.max").write_text("max\n")
    (inner / "memory.current").write_text("5000\n")
    (cgroup / "job" / "memory.max").write_text("500000\n")
    (cgroup / "job" / "memory.current").write_text("300000\n")
    (cgroup / "job" / "memory.stat").write_text("anon 1\ninactive_file 600\nactive_file 300\nslab_reclaimable 100\n")
    assert available_bytes(str(proc), str(cgroup)) == 201_000
    # The first version of control groups has other names, and a folder for memory.
    old = cgroup / "memory" / "job"
    old.mkdir(parents=True)
    (proc / "self" / "cgroup").write_text("5:cpu,cpuacct:/job\n4:memory:/job/unseen\n0::/\n")
    (old / "memory.limit_in_bytes").write_text("400000\n")
    (old / "memory.usage_in_bytes").write_text("300000\n")
    (old / "memory.stat").write_text("inactive_file 5\ntotal_inactive_file 1500\ntotal_active_file 500\n")
    assert available_bytes(str(proc), str(cgroup)) == 102_000
    (old / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert available_bytes(str(proc), str(cgroup)) == 800 << 10
    assert available_bytes(str(tmp_path / "absent"), str(cgroup)) == 1 << 62
    assert 0 < available_bytes() < 1 << 50


@pytest.mark.parametrize("levels", [3, 50, 100_000])
def test_auc_equals_counting_pairs(levels: int, seed: int) -> None:
    stream = numpy_stream(seed, "auc", levels)
    scores = stream.integers(0, levels, 300) / levels
    labels = (stream.random(300) < 0.3).astype(float)
    pairs = itertools.product(scores[labels == 1], scores[labels == 0])
    wins = [1.0 if high > low else 0.5 if high == low else 0.0 for high, low in pairs]
    assert quality(scores, labels).auc == pytest.approx(np.mean(wins), abs=1e-12)


def test_normalised_entropy_of_the_base_rate_is_one() -> None:
    labels = np.array([1.0] * 30 + [0.0] * 70)
    found = quality(np.full(100, np.log(0.3 / 0.7)), labels)
    assert found.normalised_entropy == pytest.approx(1)
    assert found.auc == pytest.approx(0.5)
    assert found.log_loss == pytest.approx(-(0.3 * np.log(0.3) + 0.7 * np.log(0.7)))
    sure = quality(np.where(labels > 0, 1000.0, -1000.0), labels)
    assert (sure.auc, sure.log_loss) == (1.0, 0.0)
    assert np.isnan(quality(np.zeros(3), np.ones(3)).auc)


def test_calibration_is_predicted_positives_by_observed_ones(seed: int) -> None:
    stream = numpy_stream(seed, "calibration")
    chances = stream.uniform(0.01, 0.99, 500)
    labels = (stream.random(500) < 0.3).astype(float)
    logits = np.log(chances / (1 - chances))
    assert quality(logits, labels).calibration == pytest.approx(chances.sum() / labels.sum())
    # Raising every prediction raises it, though the order of scores, and so AUC, stays.
    assert quality(logits + 1, labels).calibration > quality(logits, labels).calibration
    # Even where exp of a logit overflows.
    assert quality(np.array([1e5, -1e5]), np.array([1.0, 0.0])).calibration == 1.0
    assert np.isnan(quality(np.zeros(3), np.zeros(3)).calibration)


def test_phases_count_each_moment_once() -> None:
    now = 0.0
    clock = PhaseClock(lambda: now)
    with clock.phase("outer"):
        now += 1
        with clock.phase("inner"):
            now += 10
        now += 100
    now += 1000
    with clock.phase("outer"):
        now += 5
    assert clock.seconds == {"outer": 106.0, "inner": 10.0}


def test_what_happens_in_a_whole_phase_is_a_part_of_it() -> None:
    now = 0.0
    clock = PhaseClock(lambda: now)
    with clock.phase("outer"):
        now += 1
        with clock.phase("whole", is_whole=True):
            now += 10
            with clock.phase("inner"), clock.phase("whole", is_whole=True):
                now += 100
            now += 1000
        with clock.phase("inner"):
            now += 2
    assert clock.seconds == {"outer": 1.0, "whole": 1110.0, "inner": 2.0}


def test_optimizers_and_configurations_are_checked() -> None:
    with pytest.raises(ConfigError, match="dense optimizer 'lion'; allowed: adagrad, adam, sgd"):
        dense_optimizer("lion", nn.Linear(1, 1).parameters(), rate=1)
    with pytest.raises(ConfigError, match="number of ranks 9; allowed: at most 8, the slices of a global batch"):
        TrainingConfig(batch_size=10).check_world(9)
    with pytest.raises(ConfigError, match="--slices 6; allowed: powers of two, 1 to 32,768"):
        TrainingConfig(slices=6)
    with pytest.raises(ConfigError, match="dense_rate -1; allowed: above 0"):
        TrainingConfig(dense_rate=-1)
    with pytest.raises(ConfigError, match="clip_norm 0; allowed: above 0"):
        TrainingConfig(clip_norm=0)
    with pytest.raises(ConfigError, match="weight_decay -1; allowed: 0 or more"):
        TrainingConfig(weight_decay=-1)
    with pytest.raises(ConfigError, match=r"optimizer 'adem'; allowed: sgd, .*; did you mean adam\?"):
        TrainingConfig(optimizer="adem")
    assert OptimizerSpec(kind="SGD", momentum=0.9).kind is Optimizer.SGD  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"kind adm; allowed: sgd, adagrad, .*; did you mean adam\?"):
        OptimizerSpec(kind="adm")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"momentum 0\.9; allowed: 0\.0 for adam"):
        TrainingConfig(optimizer="adamw", momentum=0.9)
    with pytest.raises(ConfigError, match="decay end 5; allowed: above 7"):
        TrainingConfig(warmup=7, max_steps=5)
    with pytest.raises(ConfigError, match="needs a checkpoint folder"):
        TrainingConfig(resume=True)


def test_fingerprint_line_names_type_shape_and_bytes() -> None:
    # SHA-256 of four zero bytes.
    digest = "df3f619804a92fdb4057192dc43dd748ea778adc52bc498ce80524c014b81119"
    assert line("w", torch.zeros(1, 1)) == f"w float32 1x1 {digest}"
    assert line("w", torch.ones(2, 3).t()) == line("w", torch.ones(3, 2))
