# SPDX-License-Identifier: Apache-2.0
"""The models of `sennit train`, each against its formula in NumPy, and models of a user's own by name."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor, nn

from sennit.runtime.model.dcnv2 import DCNv2
from sennit.runtime.model.deepfm import DeepFM
from sennit.runtime.model.dlrm import DLRM
from sennit.runtime.model.factory import build, find
from sennit.runtime.model.inputs import HistoryInputs, ModelInputs
from sennit.runtime.model.loss import Loss
from sennit.runtime.sharded.tables import Table
from sennit.transport.errors import ConfigError

Array = npt.NDArray[np.floating[Any]]
SAMPLES = 7


def inputs(dense: int = 3, dims: tuple[int, ...] = (5, 5, 5, 5), **changed: Any) -> ModelInputs:
    tables = tuple(Table(name=f"table{number}", rows=9, dim=dim) for number, dim in enumerate(dims))
    return ModelInputs(**{"dense_count": dense, "tables": tables, "bottom": (6,), "top": (8, 4), "seed": 3, **changed})


def sample(given: ModelInputs, samples: int = SAMPLES) -> tuple[Tensor, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(9)
    dense = torch.randn(samples, given.dense_count, generator=generator)
    return dense, {table.name: torch.randn(samples, table.dim, generator=generator) for table in given.tables}


def linear(layer: Any, x: Array) -> Array:
    found: Array = x @ layer.weight.detach().double().numpy().T
    return found if layer.bias is None else found + layer.bias.detach().double().numpy()


def through(layers: nn.Sequential, x: Array, *, last_relu: bool) -> Array:
    """The MLP's formula."""
    found = [layer for layer in layers if isinstance(layer, nn.Linear)]
    for place, layer in enumerate(found):
        x = linear(layer, x)
        if last_relu or place < len(found) - 1:
            x = np.maximum(x, 0)
    return x


def dlrm(model: DLRM, dense: Array, vectors: list[Array]) -> Array:
    first = [] if model.bottom is None else [through(model.bottom, dense, last_relu=True)]
    z = first + vectors
    pairs = [(z[i] * z[j]).sum(1, keepdims=True) for i in range(len(z)) for j in range(i)]
    return through(model.top, np.concatenate([*first, *pairs], 1), last_relu=False)[:, 0]


def dcnv2(model: DCNv2, dense: Array, vectors: list[Array], *, stacked: bool = False) -> Array:
    first = crossed = np.concatenate([dense, *vectors], 1)
    for layer in model.cross:
        assert isinstance(layer.product, nn.Linear | nn.Sequential)
        parts = layer.product if isinstance(layer.product, nn.Sequential) else [layer.product]
        product = crossed
        for part in parts:
            product = linear(part, product)
        crossed = first * product + crossed
    if stacked:
        return linear(model.head, through(model.deep, crossed, last_relu=True))[:, 0]
    deep = through(model.deep, first, last_relu=True)
    return linear(model.head, np.concatenate([crossed, deep], 1))[:, 0]


def deepfm(model: DeepFM, dense: Array, vectors: list[Array]) -> Array:
    fields = list(vectors)
    if model.dense_vectors is not None:
        rows = model.dense_vectors.detach().double().numpy()
        fields = [dense[:, [number]] * row for number, row in enumerate(rows)] + fields
    pairs = sum(((a * b).sum(1) for a, b in itertools.combinations(fields, 2)), np.zeros(len(dense)))
    first_order = linear(model.first_order, np.concatenate([dense, *vectors], 1))[:, 0]
    found: Array = first_order + pairs + through(model.deep, np.concatenate(fields, 1), last_relu=False)[:, 0]
    return found


FORMULAS: dict[str, Callable[..., Array]] = {"dlrm": dlrm, "dcnv2": dcnv2, "deepfm": deepfm}


def compare(model: Any, given: ModelInputs, formula: Callable[..., Array], **options: Any) -> None:
    dense, vectors = sample(given)
    expected = formula(
        model, dense.double().numpy(), [vectors[name].double().numpy() for name in given.names], **options
    )
    found = model(dense, vectors)
    assert found.shape == (SAMPLES,)
    np.testing.assert_allclose(found.detach().numpy(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("changed", [{}, {"dense": 0}, {"dims": (5,)}, {"bottom": (), "top": ()}], ids=str)
@pytest.mark.parametrize("name", FORMULAS)
def test_a_model_equals_its_formula(name: str, changed: dict[str, Any]) -> None:
    given = inputs(**changed)
    compare(build(name, given), given, FORMULAS[name])


@pytest.mark.parametrize("structure", ["parallel", "stacked"])
@pytest.mark.parametrize("rank", [None, 2])
def test_cross_layers_of_tables_of_different_dims(structure: str, rank: int | None) -> None:
    given = inputs(dims=(1, 4, 7))
    model = DCNv2(given, cross_layers=2, rank=rank, structure=structure)
    assert len(model.cross) == 2
    compare(model, given, dcnv2, stacked=structure == "stacked")


@pytest.mark.parametrize("name", FORMULAS)
def test_every_parameter_and_every_vector_gets_a_gradient(name: str) -> None:
    given = inputs()
    model = build(name, given)
    dense, vectors = sample(given)
    for vector in vectors.values():
        vector.requires_grad_()
    model(dense, vectors).square().sum().backward()
    for what, tensor in (*model.named_parameters(), *vectors.items()):
        assert tensor.grad is not None, what
        assert tensor.grad.abs().sum() > 0, what


@pytest.mark.parametrize("name", FORMULAS)
def test_the_order_of_vectors_does_not_matter(name: str) -> None:
    given = inputs()
    model = build(name, given)
    dense, vectors = sample(given)
    assert torch.equal(model(dense, dict(reversed(vectors.items()))), model(dense, vectors))


@pytest.mark.parametrize("name", FORMULAS)
def test_samples_do_not_see_one_another(name: str) -> None:
    given = inputs()
    model = build(name, given)
    dense, vectors = sample(given)
    order = torch.tensor([4, 0, 6, 2, 5, 1, 3])
    moved = model(dense[order], {table: vector[order] for table, vector in vectors.items()})
    torch.testing.assert_close(moved, model(dense, vectors)[order])


def test_products_of_a_factorisation_machine_do_not_depend_on_the_order_of_fields() -> None:
    given = inputs()
    model = DeepFM(given)
    with torch.no_grad():
        for parameter in (*model.first_order.parameters(), *model.deep.parameters()):
            parameter.zero_()
    dense, vectors = sample(given)
    moved = dict(zip(vectors, reversed(vectors.values()), strict=True))
    torch.testing.assert_close(model(dense, moved), model(dense, vectors))
    assert model(dense, vectors).abs().min() > 0


@pytest.mark.parametrize("name", FORMULAS)
def test_initial_weights_depend_on_seed_and_name_only(name: str) -> None:
    found = []
    for number, seed in enumerate((5, 5, 6)):
        torch.manual_seed(number)
        found.append(dict(build(name, inputs(seed=seed)).named_parameters()))
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])
    assert not any(torch.equal(found[0][key], found[2][key]) for key in found[0])


def test_models_refuse_what_they_cannot_do() -> None:
    for name in ("dlrm", "deepfm"):
        with pytest.raises(ConfigError, match=rf"{name} .* table table0 has dim 5 and table table2 has dim 4"):
            build(name, inputs(dims=(5, 5, 4)))
    with pytest.raises(ConfigError, match="dlrm multiplies pairs of vectors, but there is only that of table table0"):
        build("dlrm", inputs(dense=0, dims=(5,)))
    for options, what in (
        ({"cross_layers": 0}, "0 cross layers"),
        ({"rank": 24}, "rank 24; allowed: 1 to 23"),
        ({"structure": "beside"}, "structure 'beside'; allowed: parallel, stacked"),
    ):
        with pytest.raises(ConfigError, match=what):
            DCNv2(inputs(), **options)
    for wrong, what in (
        ({"dense": -1}, "-1 dense features"),
        ({"dims": ()}, "a model without tables"),
        ({"top": (3, 0)}, "width in the top MLP 0"),
    ):
        with pytest.raises(ConfigError, match=what):
            inputs(**wrong)


OWN = """
import torch
from torch import nn
from sennit.runtime.model import DCNv2

class Linear(nn.Module):
    def __init__(self, inputs):
        super().__init__()
        self.names = inputs.names
        self.layer = nn.LazyLinear(1)
        self.dropout = nn.Dropout(0.5)
        self.dropout.eval()

    def forward(self, dense, vectors):
        return self.layer(torch.cat([dense, *(vectors[name] for name in self.names)], 1)).squeeze(1)

class Wide(Linear):
    def forward(self, dense, vectors):
        return super().forward(dense, vectors).unsqueeze(1)

class Squeezed(Linear):
    def forward(self, dense, vectors):
        return super().forward(dense, vectors).unsqueeze(1).squeeze()

class Raises(Linear):
    def forward(self, dense, vectors):
        return dense @ vectors["no such table"]

class Kept:
    low_rank = staticmethod(lambda inputs: DCNv2(inputs, rank=2, structure="stacked"))

def nothing(inputs):
    return None

def two(inputs, other):
    return None

instance = nn.Linear(1, 1)
number = 3
"""


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A user's file in the current folder."""
    name = f"own_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(OWN)
    (tmp_path / f"{name}_broken.py").write_text("import sys\n1 / 0\n")
    (tmp_path / f"{name}_ends.py").write_text("raise SystemExit(2)\n")
    (tmp_path / f"{name}_needs.py").write_text("import no_such_package\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["/no such folder"])
    return name


def test_a_factory_of_a_user(own_module: str) -> None:
    given = inputs()
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    model: Any = build(f"{own_module}:Linear", given)
    assert torch.equal(torch.rand(3), expected)
    assert model.training
    assert not model.dropout.training
    again: Any = build(f"{own_module}:Linear", given)
    other: Any = build(f"{own_module}:Linear", inputs(seed=4))
    weights = [made.layer.weight for made in (model, again, other)]
    assert weights[0].shape == (1, given.width)
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    compare(build(f"{own_module}:Kept.low_rank", given), given, dcnv2, stacked=True)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("dlmr", "model 'dlmr'; allowed: dlrm, dcnv2, deepfm, hstu, or package.module:factory; did you mean dlrm?"),
        ("a b:c", "model 'a b:c'; allowed: dlrm, "),
        ("no_such_module:make", "there is no module no_such_module in "),
        ("OWN.inner:make", "there is no module "),
        ("OWN_broken:make", "OWN_broken cannot be imported: ZeroDivisionError: division by zero"),
        ("OWN_needs:make", "OWN_needs cannot be imported: ModuleNotFoundError: No module named 'no_such_package'"),
        ("OWN_ends:make", "OWN_ends cannot be imported: SystemExit: 2"),
        ("OWN:Liner", "OWN has no Liner; did you mean Linear?"),
        ("OWN:number", "is a int; allowed: a function or class"),
        ("OWN:instance", "is a module already; allowed: a function or class"),
        ("OWN:two", r"has the arguments \(inputs, other\), but gets one, ModelInputs: missing .*'other'"),
        ("OWN:nothing", "returned a NoneType; allowed: a torch.nn.Module"),
        ("OWN:Wide", r"returned a tensor of float32 of shape \(2, 1\) for 2 samples; allowed: .* \(2,\)"),
        ("OWN:Squeezed", r"returned a tensor of float32 of shape \(\) for 1 samples"),
    ],
)
def test_what_is_wrong_with_a_factory_is_said(own_module: str, name: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what.replace("OWN", own_module).replace("?", r"\?")):
        build(name.replace("OWN", own_module), inputs())


def test_errors_of_a_users_model_are_left_as_they_are(own_module: str) -> None:
    with pytest.raises(KeyError) as caught:
        build(f"{own_module}:Raises", inputs())
    note = f"in model {own_module}:Raises, called with dense (2, 3) and vectors {{'table0': (2, 5), "
    assert caught.value.__notes__[0].startswith(note)


def test_a_factory_is_found_without_a_model(own_module: str) -> None:
    assert find("dcnv2") is DCNv2
    assert find(f"{own_module}:nothing")(inputs()) is None


PAGE = Path(__file__).parents[2] / "docs" / "reference" / "models.md"


def test_programs_of_the_page_are_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    names = [re.findall(r"^(?:class|def) (\w+)", program, re.MULTILINE) for program in programs]
    assert names == [["WideAndDeep"], ["low_rank"], ["Din", "pooled"], ["focal"]]
    monkeypatch.syspath_prepend(str(tmp_path))
    history = HistoryInputs(own=("table0",), past=("table1",), times=None, last=4)
    for number, (program, (name, *_)) in enumerate(zip(programs, names, strict=True)):
        (tmp_path / f"page_{number}.py").write_text(program)
        if name == "focal":
            assert Loss(f"page_{number}:{name}")(torch.zeros(4), torch.ones(4)) > 0
        else:
            made = build(f"page_{number}:{name}", inputs(dims=(30, 2), history=history))
            assert len(list(made.parameters())) > 2
