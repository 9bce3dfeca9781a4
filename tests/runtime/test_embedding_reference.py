# SPDX-License-Identifier: Apache-2.0
"""The reference against torch's own modules and optimizers, within tolerances; and the checks of its arguments."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sennit.runtime.data.seeds import torch_stream
from sennit.runtime.kernels.batch import Batch
from sennit.runtime.kernels.checks import GradientError, IdError
from sennit.runtime.kernels.engine import EmbeddingEngine
from sennit.runtime.kernels.optimizers import Decay, Optimizer, OptimizerSpec
from sennit.runtime.kernels.reference import lane_tree, leaf_tree, sums_by_row
from sennit.runtime.kernels.reference_rounding import philox, rounded
from sennit.runtime.kernels.spec import Bounds, Pooling, Precision, Rounding, ShardSpec
from sennit.transport.errors import ArgumentError, ConfigError

ROWS, DIM, BAGS = 12, 6, 40
SPEC = ShardSpec(name="t", row_count=ROWS, dim=DIM)


def one_table_batch(generator: torch.Generator, *, pooling: Pooling = Pooling.SUM, weighted: bool = False) -> Batch:
    # Every row occurs, because torch's dense optimizers update all rows.
    lengths = torch.randint(1, 5, (BAGS,), generator=generator)
    values = torch.randint(ROWS, (int(lengths.sum()),), generator=generator)
    values[:ROWS] = torch.arange(ROWS)
    weights = torch.randn(len(values), generator=generator) if weighted else None
    return Batch(
        table_of_block=(0,),
        bags_of_block=(BAGS,),
        lengths=lengths,
        values=values,
        weights=weights,
        pooling=pooling,
    )


def with_torch(weight: Tensor, batch: Batch, sample_weights: Tensor | None) -> Tensor:
    if batch.pooling is Pooling.NONE:
        return nn.functional.embedding(batch.values, weight).flatten()
    offsets = torch.cumsum(batch.lengths, 0) - batch.lengths
    mode = batch.pooling.value
    return nn.functional.embedding_bag(
        batch.values, weight, offsets, mode=mode, per_sample_weights=sample_weights
    ).flatten()


def batch_of_rows(rows: Tensor) -> Batch:
    """A bag for each of these rows."""
    lengths = torch.ones(len(rows), dtype=torch.int32)
    return Batch(table_of_block=(0,), bags_of_block=(len(rows),), lengths=lengths, values=rows)


Made = Callable[[nn.Parameter], torch.optim.Optimizer]
ORACLES: dict[str, tuple[OptimizerSpec, Made]] = {
    "sgd": (OptimizerSpec(kind=Optimizer.SGD), lambda p: torch.optim.SGD([p], lr=0.1)),
    "sgd, decay": (
        OptimizerSpec(kind=Optimizer.SGD, weight_decay=0.1),
        lambda p: torch.optim.SGD([p], lr=0.1, weight_decay=0.1),
    ),
    "momentum": (OptimizerSpec.named("sgd", momentum=0.9), lambda p: torch.optim.SGD([p], lr=0.1, momentum=0.9)),
    "nesterov, decay": (
        OptimizerSpec.named("sgd", momentum=0.9, nesterov=True, weight_decay=0.1),
        lambda p: torch.optim.SGD([p], lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    ),
    "adagrad": (
        OptimizerSpec(kind=Optimizer.ADAGRAD, epsilon=1e-6),
        lambda p: torch.optim.Adagrad([p], lr=0.1, eps=1e-6),
    ),
    "adagrad, decay": (
        OptimizerSpec(kind=Optimizer.ADAGRAD, epsilon=1e-6, weight_decay=0.1),
        lambda p: torch.optim.Adagrad([p], lr=0.1, eps=1e-6, weight_decay=0.1),
    ),
    "adam": (OptimizerSpec(kind=Optimizer.ADAM), lambda p: torch.optim.Adam([p], lr=0.1, eps=1e-8)),
    "adam, decay": (
        OptimizerSpec(kind=Optimizer.ADAM, weight_decay=0.1),
        lambda p: torch.optim.Adam([p], lr=0.1, eps=1e-8, weight_decay=0.1),
    ),
    "adamw": (
        OptimizerSpec(kind=Optimizer.ADAM, weight_decay=0.1, decay=Decay.DECOUPLED),
        lambda p: torch.optim.AdamW([p], lr=0.1, eps=1e-8, weight_decay=0.1),
    ),
    "adamw by name": (OptimizerSpec.named("AdamW"), lambda p: torch.optim.AdamW([p], lr=0.1)),
}


@pytest.mark.parametrize("oracle", ORACLES)
@pytest.mark.parametrize("pooling", Pooling)
def test_training_equals_torch(oracle: str, pooling: Pooling, seed: int) -> None:
    spec, made = ORACLES[oracle]
    generator = torch_stream(seed, "oracle", oracle, pooling.value)
    engine = EmbeddingEngine([SPEC], spec, implementation_name="reference")
    engine.weight("t").copy_(torch.randn(ROWS, DIM, generator=generator))
    parameter = nn.Parameter(engine.weight("t").clone())
    optimizer = made(parameter)
    for _ in range(4):
        batch = one_table_batch(generator, pooling=pooling)
        result = with_torch(parameter, batch, None)
        found = engine.lookup(batch)
        torch.testing.assert_close(found, result.detach(), rtol=1e-5, atol=1e-6)
        gradient = torch.randn(len(found), generator=generator)
        optimizer.zero_grad()
        torch.autograd.backward(result, gradient)
        optimizer.step()
        engine.update(batch, gradient, rate=0.1)
    torch.testing.assert_close(engine.weight("t"), parameter.detach(), rtol=1e-4, atol=1e-5)


def test_weighted_sums_and_their_gradients_equal_torch(seed: int) -> None:
    generator = torch_stream(seed, "weighted")
    engine = EmbeddingEngine([SPEC], OptimizerSpec(kind=Optimizer.SGD), implementation_name="reference")
    engine.weight("t").copy_(torch.randn(ROWS, DIM, generator=generator))
    batch = one_table_batch(generator, weighted=True)
    assert batch.weights is not None
    parameter = nn.Parameter(engine.weight("t").clone())
    weights = nn.Parameter(batch.weights.clone())
    result = with_torch(parameter, batch, weights)
    gradient = torch.randn(len(result), generator=generator)
    torch.autograd.backward(result, gradient)
    assert parameter.grad is not None
    assert weights.grad is not None
    torch.testing.assert_close(engine.lookup(batch), result.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(engine.weight_gradient(batch, gradient), weights.grad, rtol=1e-5, atol=1e-5)
    engine.update(batch, gradient, rate=1.0)
    torch.testing.assert_close(engine.weight("t"), parameter.detach() - parameter.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "kind", [Optimizer.ROW_WISE_ADAGRAD, Optimizer.PARTIAL_ROW_WISE_ADAM, Optimizer.LAMB], ids=lambda kind: kind.value
)
def test_row_wise_optimizers_equal_their_definitions_in_float64(kind: Optimizer, seed: int) -> None:
    """torch has none of these, so the test computes the papers' formulas on the dense gradient in double precision."""
    generator = torch_stream(seed, "row-wise", kind.value)
    engine = EmbeddingEngine([SPEC], OptimizerSpec(kind=kind), implementation_name="reference")
    engine.weight("t").copy_(torch.randn(ROWS, DIM, generator=generator))
    w = engine.weight("t").to(torch.float64)
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    for step in range(1, 5):
        batch = one_table_batch(generator)
        bags = torch.repeat_interleave(torch.arange(BAGS), batch.lengths)
        gradient = torch.randn(BAGS, DIM, generator=generator)
        engine.update(batch, gradient.flatten(), rate=0.1)
        g = torch.zeros_like(w).index_add(0, batch.values, gradient[bags].to(torch.float64))
        if kind is Optimizer.ROW_WISE_ADAGRAD:
            v += g.square().mean(1, keepdim=True)
            w -= 0.1 * g / (v.sqrt() + 1e-8)
            continue
        square = g.square() if kind is Optimizer.LAMB else g.square().mean(1, keepdim=True)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * square
        u = m / (1 - 0.9**step) / ((v / (1 - 0.999**step)).sqrt() + 1e-8)
        w -= 0.1 * u * (w.norm(dim=1, keepdim=True) / u.norm(dim=1, keepdim=True) if kind is Optimizer.LAMB else 1)
    torch.testing.assert_close(engine.weight("t").to(torch.float64), w, rtol=1e-4, atol=1e-5)


class AlgorithmOne:
    """McMahan et al. 2013, algorithm 1, as the paper has it: coordinate by coordinate, in double precision."""

    def __init__(self, alpha: float, beta: float, l1: float, l2: float) -> None:
        self.alpha, self.beta, self.l1, self.l2 = alpha, beta, l1, l2
        self.z: dict[tuple[int, int], float] = {}
        self.n: dict[tuple[int, int], float] = {}

    def weight(self, i: tuple[int, int]) -> float:
        z, n = self.z.get(i, 0.0), self.n.get(i, 0.0)
        if abs(z) <= self.l1:
            return 0.0
        return -(z - math.copysign(self.l1, z)) / ((self.beta + math.sqrt(n)) / self.alpha + self.l2)

    def learn(self, i: tuple[int, int], g: float) -> None:
        w, n = self.weight(i), self.n.get(i, 0.0)
        sigma = (math.sqrt(n + g * g) - math.sqrt(n)) / self.alpha
        self.z[i] = self.z.get(i, 0.0) + g - sigma * w
        self.n[i] = n + g * g


@pytest.mark.parametrize(("l1", "l2"), [(0.0, 0.0), (3.0, 0.0), (3.0, 2.0)])
def test_ftrl_equals_algorithm_1(l1: float, l2: float, seed: int) -> None:
    """From weights of 0, as the paper begins. Some rows have no lookup in a step."""
    generator = torch_stream(seed, "ftrl", str(l1), str(l2))
    engine = EmbeddingEngine(
        [SPEC], OptimizerSpec.named("ftrl", beta=0.5, l1=l1, l2=l2), implementation_name="reference"
    )
    paper = AlgorithmOne(0.1, 0.5, l1, l2)
    for _ in range(8):
        rows = torch.randperm(ROWS, generator=generator)[: ROWS // 2]
        gradient = torch.randn(len(rows), DIM, generator=generator)
        engine.update(batch_of_rows(rows), gradient.flatten(), rate=0.1)
        for row, of_row in zip(rows.tolist(), gradient.tolist(), strict=True):
            for column, g in enumerate(of_row):
                paper.learn((row, column), g)
    wanted = torch.tensor([[paper.weight((row, column)) for column in range(DIM)] for row in range(ROWS)])
    torch.testing.assert_close(engine.weight("t"), wanted, rtol=1e-4, atol=1e-6)
    # The threshold makes zeros of +0.
    zeros = engine.weight("t")[wanted == 0]
    assert len(zeros) > 0 if l1 > 0 else True
    assert not bool(zeros.signbit().any())
    # z is that of the paper times the rate.
    z = torch.tensor([[paper.z.get((row, column), 0.0) for column in range(DIM)] for row in range(ROWS)])
    torch.testing.assert_close(engine.states("t")["z"], 0.1 * z, rtol=1e-4, atol=1e-6)


def test_ftrl_begins_at_any_weight_and_takes_any_rate(seed: int) -> None:
    """Without l1 and l2 it is AdaGrad with beta below the fraction, whatever the first weights and the rates."""
    generator = torch_stream(seed, "ftrl, first")
    engine = EmbeddingEngine([SPEC], OptimizerSpec.named("ftrl", beta=0.5), implementation_name="reference")
    engine.weight("t").copy_(torch.randn(ROWS, DIM, generator=generator))
    w, n = engine.weight("t").to(torch.float64), torch.zeros(ROWS, DIM, dtype=torch.float64)
    for rate in (0.1, 0.02, 0.3, 0.0):
        g = torch.randn(ROWS, DIM, generator=generator)
        engine.update(batch_of_rows(torch.arange(ROWS)), g.flatten(), rate=rate)
        n += g.double().square()
        w -= rate * g / (n.sqrt() + 0.5)
        torch.testing.assert_close(engine.weight("t").to(torch.float64), w, rtol=1e-4, atol=1e-5)
    # Also with l1 and l2 the first weights count.
    engine = EmbeddingEngine([SPEC], OptimizerSpec.named("ftrl", l1=0.1, l2=0.1), implementation_name="reference")
    start = torch.randn(ROWS, DIM, generator=generator)
    engine.weight("t").copy_(start)
    engine.update(batch_of_rows(torch.arange(ROWS)), torch.zeros(ROWS * DIM), rate=0.1)
    torch.testing.assert_close(engine.weight("t"), start)


@pytest.mark.parametrize("name", ["native", "reference"])
def test_rows_without_lookups_keep_their_momentum(name: str) -> None:
    """As torch's SparseAdam, and unlike torch's SGD: a row moves only in steps that look it up."""
    engine = EmbeddingEngine([SPEC], OptimizerSpec.named("sgd", momentum=0.5), implementation_name=name)
    buffer = engine.states("t")["momentum_buffer"]
    engine.update(batch_of_rows(torch.tensor([1, 2])), torch.ones(2 * DIM), rate=1.0)
    for _ in range(3):
        engine.update(batch_of_rows(torch.tensor([2])), torch.zeros(DIM), rate=1.0)
    assert engine.weight("t")[1:3, 0].tolist() == [-1.0, -1.875]
    assert buffer[1:3, 0].tolist() == [1.0, 0.125]


def test_clipping_acts_on_the_summed_gradient_of_each_row() -> None:
    """Clips by value, then by norm. A row below both limits stays as it is."""
    spec = OptimizerSpec(kind=Optimizer.SGD, max_gradient=4.0, max_gradient_norm=5.0)
    engine = EmbeddingEngine([ShardSpec(name="t", row_count=3, dim=2)], spec, implementation_name="reference")
    batch = Batch(
        table_of_block=(0,),
        bags_of_block=(4,),
        lengths=torch.ones(4, dtype=torch.int32),
        values=torch.tensor([0, 2, 0, 1]),
    )
    # Row 0 gets (3, 1) + (6, 2) = (9, 3). Clipped by value it is (4, 3), with norm 5. Row 1 gets (-8, 8), then (-4, 4),
    # and then less by norm.
    engine.update(batch, torch.tensor([3.0, 1.0, 0.5, -0.5, 6.0, 2.0, -8.0, 8.0]), rate=1.0)
    expected = torch.tensor([[-4.0, -3.0], [5 / 2**0.5, -5 / 2**0.5], [-0.5, 0.5]])
    torch.testing.assert_close(engine.weight("t"), expected)


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 64, 65, 97, 160, 161, 1000])
def test_sum_of_a_run_is_the_tree_of_the_definition(length: int, seed: int) -> None:
    """The expected sum is computed chunk by chunk in Python, with numbers whose sum depends on the order."""
    gradients = torch.randn(length, 3, generator=torch_stream(seed, "run", length)) * 1000
    chunks = []
    for start in range(0, length, 32):
        total = torch.zeros(3)
        for gradient in gradients[start : start + 32]:
            total = total + gradient
        chunks.append(total)
    while len(chunks) > 1:
        chunks = [chunks[n] + chunks[n + 1] if n + 1 < len(chunks) else chunks[n] for n in range(0, len(chunks), 2)]
    rows, sums = sums_by_row(torch.full((length,), 5), torch.zeros(length, dtype=torch.int64), gradients)
    assert rows.tolist() == [5]
    assert torch.equal(sums, chunks[0].unsqueeze(0))


def test_trees_of_one_are_the_thing_itself() -> None:
    x = torch.tensor([[2.0, 3.0]])
    rows, sums = leaf_tree(x, torch.tensor([7]), torch.tensor([5]))
    assert rows.tolist() == [7]
    assert torch.equal(sums, x)
    assert torch.equal(lane_tree(torch.tensor([[2.0]])), torch.tensor([2.0]))
    assert torch.equal(lane_tree(torch.tensor([[1.0, 2.0, 4.0, 8.0, 16.0]])), torch.tensor([31.0]))


# The known answers of Random123 for philox4x32-10 (kat_vectors).
@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (1 << 64) - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            0x299F31D0_A4093822,
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter: tuple[int, ...], key: int, answer: tuple[int, ...]) -> None:
    c0, c1, c2, c3 = (torch.tensor([word]) for word in counter)
    assert tuple(int(word) for word in philox((c0, c1, c2, c3), key)) == answer


@pytest.mark.parametrize("precision", [Precision.FP16, Precision.BF16], ids=lambda precision: precision.name)
@pytest.mark.parametrize("scale", [1.0, 3e-5, 2e-7])
def test_stochastic_rounding_goes_to_a_neighbour_and_keeps_the_mean(precision: Precision, scale: float) -> None:
    spec = ShardSpec(name="t", row_count=4000, dim=64, precision=precision)
    for value in (0.3 * scale, -0.7 * scale):
        x = torch.full((4000, 64), value)
        found = rounded(spec, x, torch.arange(4000), Rounding.STOCHASTIC, step=1, seed=9).to(torch.float64)
        low, high = found.min(), found.max()
        exact = float(x[0, 0])
        assert low <= exact <= high
        steps = torch.unique(found)
        assert len(steps) <= 2
        spread = float(high - low)
        # The mean of 256,000 draws is within 5 standard deviations (at most half a step each).
        assert abs(float(found.mean()) - exact) <= 5 * spread / 2 / 256_000**0.5 + 1e-3 * spread * (spread == 0)


def test_what_a_format_holds_is_stored_as_it_is() -> None:
    for precision in (Precision.FP16, Precision.BF16):
        bits = torch.arange(1 << 16).to(torch.uint16).view(precision.dtype).view(-1, 64)
        spec = ShardSpec(name="t", row_count=len(bits), dim=64, precision=precision)
        found = rounded(spec, bits.to(torch.float32), torch.arange(len(bits)), Rounding.STOCHASTIC, step=1, seed=2)
        number = ~bits.isnan()
        assert torch.equal(found[number].view(torch.int16), bits[number].view(torch.int16))
        assert bool(found[~number].isnan().all())


def small_engine(bounds: Bounds = Bounds.ERROR) -> EmbeddingEngine:
    engine = EmbeddingEngine([SPEC], OptimizerSpec(kind=Optimizer.SGD), implementation_name="reference", bounds=bounds)
    engine.weight("t").fill_(1.0)
    return engine


def batch_of_ids(*ids: int) -> Batch:
    return Batch(
        table_of_block=(0,), bags_of_block=(1,), lengths=torch.tensor([len(ids)]), values=torch.tensor(list(ids))
    )


@pytest.mark.parametrize("wrong", [-1, ROWS, 1 << 40])
def test_an_id_out_of_range_raises_before_anything_changes(wrong: int) -> None:
    engine = small_engine()
    batch = batch_of_ids(3, wrong, 4)
    for call in (lambda: engine.lookup(batch), lambda: engine.update(batch, torch.ones(DIM), rate=1.0)):
        with pytest.raises(IdError, match=rf"table t: id {wrong} at position 1; allowed: \[0, {ROWS}\)"):
            call()
    assert bool((engine.weight("t") == 1).all())
    assert engine.step == 0


def test_wrong_lengths_are_named() -> None:
    engine = small_engine()
    values = torch.tensor([1, 2])
    for lengths, text in (([3], "lengths of 3 lookups in all, but 2 ids"), ([-1, 3], "bag 0 has length -1")):
        batch = Batch(table_of_block=(0,), bags_of_block=(len(lengths),), lengths=torch.tensor(lengths), values=values)
        with pytest.raises(ArgumentError, match=text):
            engine.lookup(batch)


def test_a_batch_of_the_wrong_form_is_refused() -> None:
    good = {
        "table_of_block": (0,),
        "bags_of_block": (1,),
        "lengths": torch.tensor([2]),
        "values": torch.tensor([1, 2]),
    }
    wrong: list[tuple[str, object]] = [
        ("lengths", torch.tensor([2.0])),
        ("values", torch.tensor([1, 2], dtype=torch.int16)),
        ("values", torch.tensor([[1, 2]])),
        ("values", torch.tensor([1, 0, 2])[::2]),
        ("weights", torch.tensor([1.0])),
        ("weights", torch.tensor([1.0, 2.0], dtype=torch.float64)),
        ("bags_of_block", (2,)),
        ("bags_of_block", (-1,)),
        ("table_of_block", (0, 0)),
    ]
    for name, value in wrong:
        with pytest.raises(ArgumentError):
            Batch(**(good | {name: value}))  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="weights with pooling none; allowed: sum, mean"):
        Batch(**good, weights=torch.ones(2), pooling=Pooling.NONE)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="block 0 is for table 1; allowed: 0 to 0"):
        small_engine().lookup(Batch(**(good | {"table_of_block": (1,)})))  # type: ignore[arg-type]
    for gradient in (torch.ones(DIM + 1), torch.ones(DIM, dtype=torch.float64), torch.ones(2 * DIM)[::2]):
        with pytest.raises(ArgumentError, match="gradient is"):
            small_engine().update(Batch(**good), gradient, rate=1.0)  # type: ignore[arg-type]


def test_a_gradient_that_is_not_finite_names_table_and_row() -> None:
    engine = small_engine()
    batch = Batch(table_of_block=(0,), bags_of_block=(2,), lengths=torch.tensor([2, 1]), values=torch.tensor([7, 5, 3]))
    gradient = torch.ones(2 * DIM)
    gradient[1] = float("nan")
    with pytest.raises(GradientError, match="gradient of 2 rows is not finite, first table t row 5"):
        engine.update(batch, gradient, rate=0.5)
    expected = torch.ones(ROWS, DIM)
    expected[3] = 0.5
    assert torch.equal(engine.weight("t"), expected)
    assert engine.rows_skipped["t"] == 2


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("epsilon", -1.0),
        ("beta1", 1.0),
        ("beta2", float("nan")),
        ("weight_decay", -0.1),
        ("max_gradient", 0.0),
        ("max_gradient_norm", -1.0),
        ("momentum", 1.0),
        ("beta", 0.0),
        ("l1", -1.0),
        ("l2", float("inf")),
    ],
)
def test_hyperparameters_out_of_range_are_refused(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=field):
        OptimizerSpec(**{field: value})  # type: ignore[arg-type]


def test_options_of_another_optimizer_are_refused() -> None:
    wrong: list[tuple[str, dict[str, Any], str]] = [
        ("adam", {"momentum": 0.9}, r"momentum 0\.9; allowed: 0\.0 for adam \(sgd has it\)"),
        ("sgd", {"nesterov": True}, "nesterov True; allowed: False without a momentum"),
        ("sgd", {"l1": 0.5}, r"l1 0\.5; allowed: 0\.0 for sgd \(ftrl has it\)"),
        ("ftrl", {"decay": Decay.DECOUPLED}, "allowed: l2 for ftrl"),
        ("adem", {}, r"optimizer 'adem'; allowed: sgd, adagrad, .*, adamw; did you mean adam\?"),
    ]
    for name, options, text in wrong:
        with pytest.raises(ConfigError, match=text):
            OptimizerSpec.named(name, **options)
    # Another kind does not keep what only the old kind has.
    changed = OptimizerSpec.named("sgd", momentum=0.9, epsilon=1e-3).changed(kind=Optimizer.ADAM)
    assert changed == OptimizerSpec.named("adam", epsilon=1e-3)


def test_tables_and_engines_out_of_range_are_refused() -> None:
    for field, value in (("row_count", -1), ("row_count", 1 << 32), ("dim", 0), ("dim", 4097), ("first_row", -1)):
        with pytest.raises(ConfigError, match=f"{field} {value}; allowed"):
            ShardSpec(**({"name": "t", "row_count": 3, "dim": 4} | {field: value}))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="two tables are called t"):
        EmbeddingEngine([SPEC, SPEC], OptimizerSpec())
    with pytest.raises(ConfigError, match="implementation 'x'"):
        EmbeddingEngine([SPEC], OptimizerSpec(), implementation_name="x")
    for name in ("reference", "native", "native-portable"):
        with pytest.raises(ConfigError, match=f"{name} with tables on cuda:0; allowed: cpu"):
            EmbeddingEngine([SPEC], OptimizerSpec(), implementation_name=name, device="cuda:0")
    for name, threads in (("native", 0), ("native", 257), ("reference", 2), ("triton", 2)):
        with pytest.raises(ConfigError, match=f"{threads} threads for implementation {name}; allowed: 1"):
            EmbeddingEngine([SPEC], OptimizerSpec(), implementation_name=name, threads=threads)


def test_bits_depend_on_neither_the_other_tables_nor_the_split_of_rows(seed: int) -> None:
    """A table beside others, alone, and as two halves of rows in two processes."""
    generator = torch_stream(seed, "split")
    start = torch.randn(ROWS, DIM, generator=generator)
    ids = torch.randint(ROWS, (300,), generator=generator)
    gradient = torch.randn(300, DIM, generator=generator)

    def trained(*tables: ShardSpec) -> Tensor:
        engine = EmbeddingEngine(tables, OptimizerSpec(), implementation_name="reference", seed=5)
        keep = [(ids >= t.first_row) & (ids < t.first_row + t.row_count) for t in tables]
        for part in tables:
            engine.weight(part.name).copy_(start[part.first_row : part.first_row + part.row_count])
        counts = tuple(int(mask.sum()) for mask in keep)
        batch = Batch(
            table_of_block=tuple(range(len(tables))),
            bags_of_block=counts,
            lengths=torch.ones(sum(counts), dtype=torch.int32),
            values=torch.cat([ids[mask] - part.first_row for mask, part in zip(keep, tables, strict=True)]),
        )
        engine.update(batch, torch.cat([gradient[mask] for mask in keep]).flatten(), rate=0.1)
        return torch.cat([engine.weight(part.name) for part in tables])

    spec = ShardSpec(name="t", row_count=ROWS, dim=DIM, precision=Precision.BF16)
    whole = trained(spec)
    assert torch.equal(trained(spec, ShardSpec(name="u", row_count=ROWS, dim=DIM))[:ROWS].to(torch.bfloat16), whole)
    halves = [ShardSpec(name="t", row_count=6, dim=DIM, precision=Precision.BF16, first_row=at) for at in (0, 6)]
    parts = [trained(half) for half in halves]
    assert torch.equal(torch.cat(parts), whole)
    assert len(list(itertools.chain(*parts))) == ROWS
