# SPDX-License-Identifier: Apache-2.0
# Torch types its nested tensors thinly:
# mypy: disable-error-code="no-untyped-call"
"""The model `hstu`, against the same formulas in padded torch with one mask for each sample."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sennit.runtime.model.factory import build, reads_histories
from sennit.runtime.model.hstu import TIME_BUCKETS, Hstu
from sennit.runtime.model.inputs import HistoryInputs, ModelInputs
from sennit.runtime.sharded.tables import Table
from sennit.transport.errors import ConfigError

LENGTHS = (0, 3, 1, 7, 7, 2)
"""Events of each sample's history."""

DIMS = {"film": 8, "user": 3, "genre": 5, "rating": 4}
HISTORY = HistoryInputs(own=("film",), past=("rating",), times="at", last=7)


def inputs(**changed: Any) -> ModelInputs:
    tables = tuple(Table(name=name, rows=9, dim=dim, pooling="none") for name, dim in DIMS.items())
    given: dict[str, Any] = {
        "dense_count": 2,
        "tables": tables,
        "bottom": (6,),
        "top": (8,),
        "seed": 3,
        "history": HISTORY,
    }
    return ModelInputs(**given | changed)


class Drawn:
    """Random arguments for samples with these histories."""

    def __init__(self, lengths: tuple[int, ...] = LENGTHS, seed: int = 5) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.lengths = lengths
        counts = {
            "film": [length + 1 for length in lengths],
            "rating": list(lengths),
            "user": [1] * len(lengths),
            "genre": [place % 3 for place in range(len(lengths))],
        }
        self.rows = {
            name: [torch.randn(count, DIMS[name], generator=generator).requires_grad_() for count in of_sample]
            for name, of_sample in counts.items()
        }
        self.times = [
            torch.randint(1, 10**6, (length + 1,), generator=generator).cumsum(0) + 10**9 for length in lengths
        ]
        self.dense = torch.randn(len(lengths), 2, generator=generator)

    def arguments(self, samples: list[int] | None = None) -> tuple[Tensor, dict[str, Any], dict[str, Any]]:
        chosen = list(range(len(self.lengths))) if samples is None else samples
        vectors = {name: nested([rows[sample] for sample in chosen]) for name, rows in self.rows.items()}
        return self.dense[chosen], vectors, {"at": nested([self.times[sample] for sample in chosen])}


def nested(parts: list[Tensor]) -> Tensor:
    offsets = torch.tensor([0, *(len(part) for part in parts)]).cumsum(0)
    return torch.nested.nested_tensor_from_jagged(torch.cat(parts), offsets)


def alone(model: Hstu, drawn: Drawn, sample: int) -> Tensor:
    """The logit of one sample, from the formulas: whole score matrices and a mask."""
    events: Any = model.events
    rows = {name: parts[sample] for name, parts in drawn.rows.items()}
    event = events["film"](rows["film"])
    known = events["rating"](rows["rating"])
    candidate = event[-1]
    event = torch.cat([event[:-1] + known, event[-1:]])
    context: Any = model.context
    about = [context[name](rows[name].sum(0)) for name in ("user", "genre")]
    assert model.dense is not None
    about.append(model.dense(drawn.dense[sample]))
    x = torch.cat([torch.stack(about), event])
    count, heads = len(x), 2
    times = torch.cat([drawn.times[sample][:1].repeat(len(about)), drawn.times[sample]])
    place = (torch.arange(count) - len(about) + 1).clamp(min=0)
    distance = (place[:, None] - place[None, :]).abs()
    since = (times[:, None] - times[None, :]).abs()
    bucket = torch.where(since > 0, (since.double() + 0.5).log2().floor().long() + 1, 0).clamp(max=TIME_BUCKETS - 1)
    attends = torch.arange(count)[:, None] >= torch.arange(count)[None, :]
    attends[: len(about), :-1] = True
    longest = float(len(about) + HISTORY.last + 1)
    for layer in model.layers:
        assert isinstance(layer, nn.Module)
        own: Any = layer
        gate, value, query, key = nn.functional.silu(own.split(own.before(x))).chunk(4, 1)
        query, key, value = (part.view(count, heads, -1).transpose(0, 1) for part in (query, key, value))
        score = query @ key.transpose(1, 2) / query.shape[2] ** 0.5
        score = score + own.position_bias[:, distance] + own.time_bias[:, bucket]
        weight = nn.functional.silu(score) / longest * attends
        x = x + own.out(own.after((weight @ value).transpose(0, 1).reshape(count, -1)) * gate)
    found = model.norm(x[-1])
    logit: Tensor = model.head(torch.cat([found, found * candidate, torch.cat(about)]))
    return logit.squeeze(0)


def test_logits_and_gradients_are_those_of_the_formulas() -> None:
    model, again = (build("hstu", inputs()) for _ in range(2))
    drawn, other = Drawn(), Drawn()
    logits = model(*drawn.arguments())
    assert isinstance(again, Hstu)
    expected = torch.stack([alone(again, other, sample) for sample in range(len(LENGTHS))])
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    logits.sin().sum().backward()
    expected.sin().sum().backward()
    gradients = {name: parameter.grad for name, parameter in again.named_parameters()}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-3, atol=1e-5, msg=name)
        assert parameter.grad is not None
        assert parameter.grad.abs().sum() > 0, name
    for name, parts in drawn.rows.items():
        for part, wanted in zip(parts, other.rows[name], strict=True):
            torch.testing.assert_close(part.grad, wanted.grad, rtol=1e-3, atol=1e-5)


def test_samples_do_not_see_one_another() -> None:
    model, drawn = build("hstu", inputs()), Drawn()
    whole = model(*drawn.arguments())
    order = [3, 0, 5, 1]
    torch.testing.assert_close(model(*drawn.arguments(order)), whole[order])


def test_later_events_matter_and_so_does_their_order() -> None:
    model, drawn = build("hstu", inputs()), Drawn()
    whole = model(*drawn.arguments())
    with torch.no_grad():
        rows = drawn.rows["rating"][3]
        rows.copy_(rows.flip(0))
    changed = model(*drawn.arguments())
    is_changed = (changed - whole).abs() > 1e-6
    assert is_changed.tolist() == [sample == 3 for sample in range(len(LENGTHS))]


@pytest.mark.parametrize(
    "changed",
    [
        {"dense_count": 0},
        {"history": HistoryInputs(own=("film",), past=(), times=None, last=7)},
        {"history": HistoryInputs(own=("film", "rating"), past=(), times="at", last=9)},
        {"heads": 4, "layers": 1},
        {"label_count": 3},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_other_inputs(changed: dict[str, Any]) -> None:
    given = inputs(**changed)
    model, drawn = build("hstu", given), Drawn()
    if given.history is not None and "rating" in given.history.own:
        drawn.rows["rating"] = [torch.randn(length + 1, DIMS["rating"]) for length in LENGTHS]
    dense, vectors, integers = drawn.arguments()
    logits = model(dense[:, : given.dense_count], vectors, integers)
    assert logits.shape == given.logits_shape(len(LENGTHS))
    assert torch.isfinite(logits).all()


def test_initial_weights_depend_on_the_seed_and_norms_begin_as_they_are() -> None:
    first, same, other = (build("hstu", inputs(seed=seed)).state_dict() for seed in (5, 5, 6))
    assert all(torch.equal(first[name], same[name]) for name in first)
    norms = [name for name in first if "norm" in name or "before" in name or "after" in name]
    assert len(norms) == 2 * 5
    for name in first:
        assert torch.equal(first[name], other[name]) == (name in norms), name


def test_attention_of_bfloat16_is_near_that_of_float32() -> None:
    """Its weights are float32, and so is all that is not in a product of attention."""
    drawn = Drawn()
    exact, rounded = build("hstu", inputs()), build("hstu", inputs(attention="bf16"))
    rounded.load_state_dict(exact.state_dict())
    logits = [model(*drawn.arguments()) for model in (exact, rounded)]
    assert not torch.equal(logits[0], logits[1])
    torch.testing.assert_close(logits[1], logits[0], rtol=0.05, atol=0.05)
    logits[1].sum().backward()
    assert all(x.grad is not None and x.grad.dtype == torch.float32 for x in rounded.parameters())


def test_what_it_needs_is_said() -> None:
    assert reads_histories("hstu")
    assert not reads_histories("dlrm")
    with pytest.raises(ConfigError, match=r"hstu reads histories, and these data have none; allowed: data with a"):
        build("hstu", inputs(history=None))
    with pytest.raises(ConfigError, match=r"hstu: 8 columns of table film for 3 heads; allowed: a multiple"):
        build("hstu", inputs(heads=3))
    with pytest.raises(ConfigError, match=r"0 layers; allowed: 1 or more"):
        inputs(layers=0)
    with pytest.raises(ConfigError, match=r"attention 'fp16'; allowed: fp32, bf16"):
        inputs(attention="fp16")


def test_a_layer_is_that_of_its_authors(seed: int) -> None:
    """The research layer of meta-recsys/generative-recommenders, padded, with the same weights."""
    folder = os.environ.get("GENERATIVE_RECOMMENDERS_CLONE")
    if not folder:
        pytest.skip("GENERATIVE_RECOMMENDERS_CLONE names no clone of meta-recsys/generative-recommenders")
    command = [sys.executable, str(Path(__file__).with_name("research_hstu.py")), str(seed)]
    path = os.pathsep.join([folder, *sys.path])
    subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, check=True, timeout=120)
