# SPDX-License-Identifier: Apache-2.0
"""Rows in 8 bits: the error of weights, and that torch's own operators read them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from sennit.commands.cli import app
from sennit.runtime.checkpoint import reading
from sennit.runtime.data.seeds import torch_stream
from sennit.runtime.kernels.int8 import float_rows, int8_rows
from sennit.runtime.training.export import export_int8
from sennit.transport.errors import ArgumentError, ConfigError, DeviceError
from tests.runtime.trainer_runs import save_then_train_on
from tests.runtime.world import WorldFactory

ROWS = 5000  # more rows than are packed at once


def weights(seed: int, dim: int, scale: float, dtype: torch.dtype = torch.float32) -> Tensor:
    found = torch.randn(ROWS, dim, generator=torch_stream(seed, "int8", dim)) * scale
    found[1] = found[1, 0]
    found[2] = 0
    return found.to(dtype)


def parts(packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q, scale and bias in float64."""
    tail = packed[:, -8:].contiguous().view(torch.float32).to(torch.float64)
    return packed[:, :-8].to(torch.float64), tail[:, :1], tail[:, 1:]


@pytest.mark.parametrize("dim", [1, 7, 64])
@pytest.mark.parametrize(
    ("scale", "dtype"),
    [
        (1.0, torch.float32),
        (1.0, torch.float16),
        (1.0, torch.bfloat16),
        (1e-4, torch.float32),
        (1e-43, torch.float32),  # subnormal scales
        (6e37, torch.float32),  # differences beyond float32's range
    ],
)
def test_no_weight_is_off_by_more_than_half_a_step(dim: int, scale: float, dtype: torch.dtype, seed: int) -> None:
    x = weights(seed, dim, scale, dtype).to(torch.float64)
    q, step, bias = parts(int8_rows(x.to(dtype)))
    assert bool(((x - (q * step + bias)).abs() <= step / 2 * (1 + 1e-12)).all())
    # Finer steps would not reach from the least to the greatest weight.
    low, high = x.aminmax(dim=1, keepdim=True)
    coarser = step.to(torch.float32).nextafter(torch.tensor(-1.0)).to(torch.float64)
    assert bool(((coarser < (high - low) / 255) | (step == 0)).all())
    assert torch.equal(bias, low)


def test_a_row_of_equal_weights_is_exact(seed: int) -> None:
    x = weights(seed, 8, 1.0)
    found = float_rows(int8_rows(x))
    assert torch.equal(found[1:3], x[1:3])


def test_torch_unpacks_and_pools_it(seed: int) -> None:
    """Equal within float32's rounding, because torch's operator may fuse a multiplication with an addition."""
    generator = torch_stream(seed, "bags")
    packed = int8_rows(weights(seed, 20, 0.3))
    q, step, bias = parts(packed)
    exact = q * step + bias
    torch.testing.assert_close(
        torch.ops.quantized.embedding_bag_byte_unpack(packed).to(torch.float64), exact, rtol=0, atol=1e-6
    )
    torch.testing.assert_close(float_rows(packed).to(torch.float64), exact, rtol=0, atol=1e-6)
    lengths = torch.randint(6, (300,), generator=generator)
    ids = torch.randint(ROWS, (int(lengths.sum()),), generator=generator)
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
    found = torch.ops.quantized.embedding_bag_byte_rowwise_offsets(packed, ids, offsets, include_last_offset=True)
    bags = torch.repeat_interleave(torch.arange(300), lengths)
    wanted = torch.zeros(300, 20, dtype=torch.float64).index_add(0, bags, exact[ids])
    torch.testing.assert_close(found.to(torch.float64), wanted, rtol=0, atol=1e-5)


def test_it_is_at_least_as_close_as_what_torch_packs(seed: int) -> None:
    x = weights(seed, 32, 1.0)
    ours, theirs = int8_rows(x), torch.ops.quantized.embedding_bag_byte_prepack(x)
    assert ours.shape == theirs.shape
    q, step, bias = parts(ours)
    their_q, their_step, their_bias = parts(theirs)
    assert torch.equal(bias, their_bias)
    torch.testing.assert_close(step, their_step, rtol=1e-6, atol=0)
    assert float((q - their_q).abs().max()) <= 1
    off = (x - (q * step + bias)).square().sum()
    assert float(off) <= float((x - (their_q * their_step + their_bias)).square().sum()) * (1 + 1e-6)


def test_weights_that_are_not_finite_are_named(seed: int) -> None:
    x = weights(seed, 4, 1.0)
    x[4321, 2] = float("inf")
    with pytest.raises(ArgumentError, match="table ads row 4321 has a weight that is not finite"):
        int8_rows(x, name="ads")


def test_the_command_writes_what_torch_loads(kept_world: WorldFactory, seed: int, tmp_path: Path) -> None:
    """The checkpoint is of two ranks, which own different tables."""
    kept_world(2).run(save_then_train_on, seed=seed, folder=str(tmp_path), before=3, after=0)
    source, output = tmp_path / "step-000000003", tmp_path / "rows.pt"
    done = CliRunner().invoke(app, ["export", str(tmp_path), str(output)])
    assert done.exit_code == 0, done.output
    assert f"3 tables of {source}" in done.output
    found = torch.load(output, weights_only=True, mmap=True)
    tables = {name: torch.empty(len(rows), rows.shape[1] - 8) for name, rows in found["tables"].items()}
    assert sorted(tables) == ["genre", "hour", "user"]
    trained = {f"tables.{name}/0.0.weight": table for name, table in tables.items()}
    trained |= {f"dense.{name}": torch.empty_like(weight) for name, weight in found["dense"].items()}
    reading.load(source, trained, alone=True)
    for name, rows in found["tables"].items():
        assert torch.equal(rows, int8_rows(trained[f"tables.{name}/0.0.weight"]))
    assert found["dense"]
    for name, weight in found["dense"].items():
        assert torch.equal(weight, trained[f"dense.{name}"])


def test_what_cannot_be_exported_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no checkpoint, and no folder of checkpoints"):
        export_int8(tmp_path, tmp_path / "out")
    done = CliRunner().invoke(app, ["export", str(tmp_path / "none"), str(tmp_path / "out")])
    assert done.exit_code == 1
    assert "error: " in done.output


def test_tensor_trains_are_refused_by_name(kept_world: WorldFactory, seed: int, tmp_path: Path) -> None:
    kept_world(1).run(save_then_train_on, seed=seed, folder=str(tmp_path), before=1, after=0, tensor_train="10:2")
    with pytest.raises(ConfigError, match="table hour is a tensor train; allowed: tables with rows of their own"):
        export_int8(tmp_path, tmp_path / "rows.pt")
    assert not (tmp_path / "rows.pt").exists()


def test_a_full_disk_leaves_no_half_file(kept_world: WorldFactory, seed: int, tmp_path: Path) -> None:
    kept_world(1).run(save_then_train_on, seed=seed, folder=str(tmp_path), before=1, after=0)
    (tmp_path / "out.partial").symlink_to("/dev/full")
    with pytest.raises(DeviceError, match=f"{tmp_path}/out was not written: "):
        export_int8(tmp_path, tmp_path / "out")
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-000000001"]
