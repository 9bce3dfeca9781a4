# SPDX-License-Identifier: Apache-2.0
"""The dense part of a step, measured without a group of ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from sennit.runtime.model.factory import MODELS
from sennit.runtime.model.inputs import HistoryInputs, ModelInputs
from sennit.runtime.model.trial import Trial
from sennit.runtime.planner import dense
from sennit.runtime.sharded.slices import Slices
from sennit.runtime.sharded.tables import Table

INPUTS = ModelInputs(dense_count=3, tables=(Table(name="t", rows=1, dim=4),), bottom=(8,), top=(8,), seed=1)


class Narrow(nn.Module):
    """Weights in bfloat16: their gradients are summed in float32."""

    def __init__(self, inputs: ModelInputs) -> None:
        super().__init__()
        self.layer = nn.Linear(inputs.dense_count + 4, 1, dtype=torch.bfloat16)

    def forward(self, numbers: Tensor, vectors: dict[str, Tensor]) -> Tensor:
        scores: Tensor = self.layer(torch.cat([numbers, vectors["t"]], 1).to(torch.bfloat16))
        return scores.squeeze(1).float()


@pytest.mark.parametrize("model", ["dlrm", "narrow"])
@pytest.mark.parametrize("world", [1, 3])
def test_any_rank_of_any_world_can_measure_its_model(monkeypatch: pytest.MonkeyPatch, model: str, world: int) -> None:
    monkeypatch.setitem(MODELS, "narrow", Narrow)
    for rank in range(world):
        slices = Slices(count=8, rank=rank, world_size=world)
        found = dense.measure(model, INPUTS, slices=slices, batch=67, budget_s=0.0)
        assert found.slice_s > 0
        assert found.update_s > 0
        assert (found.early_s > 0) == (model == "dlrm")


def test_histories_have_the_lengths_of_the_data() -> None:
    """The mean alone would hide what attention costs: it grows with the square."""
    tables = tuple(Table(name=name, rows=9, dim=4) for name in ("film", "rating", "user"))
    history = HistoryInputs(own=("film",), past=("rating",), times="at", last=9)
    inputs = ModelInputs(dense_count=0, tables=tables, history=history)
    trial = Trial(inputs, 4, reads_histories=True, lengths={"film": [0, 0, 1, 1, 9, 9, 3, 3], "user": [2]})
    vectors, integers = trial.arguments()
    lengths = {name: nested.offsets().diff().tolist() for name, nested in (vectors | integers).items()}
    assert lengths == {"film": [1, 1, 9, 3], "rating": [0, 0, 8, 2], "user": [2, 2, 2, 2], "at": [1, 1, 9, 3]}
    assert integers["at"].values().tolist() == [0, 0, *range(9), *range(3)]
    assert trial.leaves["rating"].shape == (10, 4)
