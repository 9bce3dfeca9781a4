# SPDX-License-Identifier: Apache-2.0
"""Training with tables in tensor-train form: the choice of tables, their owners, bits, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sennit.offload.ingest.facts import TableFacts
from sennit.runtime.kernels.spec import TableSpec
from sennit.runtime.kernels.tensor_train import TensorTrainSpec
from sennit.runtime.model.embedding import embedding_engine
from sennit.runtime.model.stored import TableStore
from sennit.runtime.model.tensor_train import TensorTrainRule, parts, table_spec
from sennit.runtime.training.config import TrainingConfig
from sennit.runtime.training.report import EmbeddingSize
from sennit.transport.errors import ConfigError

CASES = "training_cases.py"
# This rule takes the first and the last of the tables of 20, 6 and 24 rows.
RULE = "10:2"


def table(name: str, row_count: int) -> TableFacts:
    return TableFacts(name=name, row_count=row_count, mean_length=1)


def test_large_tables_become_tensor_trains_where_it_makes_them_smaller() -> None:
    rule = TensorTrainRule.parse("1000:4")
    assert rule == TensorTrainRule(rows_at_least=1000, rank=4)
    assert isinstance(table_spec(table("a", 1000), dim=16, rule=rule), TensorTrainSpec)
    small = TableSpec(name="a", row_count=999, dim=16)
    assert table_spec(table("a", 999), dim=16, rule=rule) == small
    assert table_spec(table("a", 999), dim=16, rule=None) == small
    # At rank 200 the cores of so few rows are larger than the table.
    wide = TensorTrainRule(rows_at_least=1, rank=200)
    assert table_spec(table("a", 999), dim=16, rule=wide) == small
    assert parts(small) == (small,)
    train = table_spec(table("a", 1000), dim=16, rule=rule)
    assert [part.name for part in parts(train)] == ["a.core1", "a.core2", "a.core3"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1000", "tensor train '1000'; allowed: ROWS_AT_LEAST:RANK, like 100000:16"),
        ("a:b", "tensor train 'a:b'; allowed"),
        ("0:4", "rows of a tensor train 0; allowed: 1 to 4294967295"),
        ("9999999999:4", "rows of a tensor train 9999999999; allowed: 1 to"),
        ("10:0", "rank of a tensor train 0; allowed: 1 to 4096"),
        ("10:5000", "rank of a tensor train 5000; allowed: 1 to 4096"),
    ],
)
def test_wrong_rules_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TensorTrainRule.parse(text)


def test_a_rank_too_high_for_kernels_names_the_table() -> None:
    rule = TensorTrainRule(rows_at_least=1, rank=100)
    with pytest.raises(ConfigError, match=r"table a: numbers in a slice of core 2 .* 10000; allowed: 1 to 4096"):
        table_spec(table("a", 10_000_000), dim=16, rule=rule)


def test_a_run_has_tensor_trains_or_a_store(tmp_path: Path) -> None:
    store = TableStore(folder=tmp_path, memory_bytes=1 << 20)
    with pytest.raises(ConfigError, match="--tensor-train with --table-store"):
        TrainingConfig(tensor_train=TensorTrainRule(rows_at_least=1, rank=1), table_store=store)


def test_initial_rows_have_the_variance_of_ordinary_ones(seed: int) -> None:
    tables = [table("a", 5000), table("b", 5000)]
    engine = embedding_engine(tables, dim=16, seed=seed, tensor_train=TensorTrainRule(rows_at_least=1, rank=8))
    alone = embedding_engine(tables[:1], dim=16, seed=seed, tensor_train=TensorTrainRule(rows_at_least=1, rank=8))
    first, second = (engine.materialise(name, 0, 5000) for name in ("a", "b"))
    assert torch.equal(alone.materialise("a", 0, 5000), first)
    assert not torch.equal(first, second)
    # Deviation of the uniform distribution within 1 / √rows. The first core has few independent numbers: 18 · 8.
    assert float(first.std()) == pytest.approx((3 * 5000) ** -0.5, rel=0.2)


def test_report_says_what_is_saved() -> None:
    rule = TensorTrainRule(rows_at_least=1000, rank=4)
    specs = [table_spec(table(name, rows), dim=16, rule=rule) for name, rows in (("a", 100_000), ("b", 10))]
    size = EmbeddingSize.of(specs)
    train = specs[0]
    assert isinstance(train, TensorTrainSpec)
    assert (size.tables, size.tensor_trains) == (2, 1)
    assert size.table_numbers == 100_010 * 16
    assert size.stored_numbers == train.parameter_count + 160
    ratio = size.table_numbers / size.stored_numbers
    text = f"2 tables, 1,600,160 numbers; {size.stored_numbers:,} stored ({ratio:.1f} times fewer): 1 tensor train"
    assert str(size) == text
    assert str(EmbeddingSize.of(specs[1:])) == "1 tables, 160 numbers"


def test_trains_lie_whole_on_one_rank_and_two_runs_have_the_same_bits(kept_world: Any, seed: int) -> None:
    for size in (1, 2):
        one, two = (kept_world(size).run(CASES, "train", seed=seed, steps=20, tensor_train=RULE) for _ in range(2))
        assert len({answer["sha256"] for answer in one + two}) == 1
        for name in ("user", "hour"):
            cores = {f"table.{name}.core{number}" for number in (1, 2, 3)}
            assert sum(cores <= answer["weights"].keys() for answer in one) == 1
            assert not any(f"table.{name}" in answer["weights"] for answer in one)
        assert sum("table.genre" in answer["weights"] for answer in one) == 1
    plain = kept_world(1).run(CASES, "train", seed=seed, steps=20)
    assert plain[0]["sha256"] != one[0]["sha256"]


def test_ranks_do_not_change_what_is_computed(kept_world: Any, seed: int) -> None:
    """The dense part's sums have another order, as without tensor trains."""
    found = []
    for size in (1, 2):
        weights: dict[str, Any] = {}
        for answer in kept_world(size).run(CASES, "train", seed=seed, steps=8, tensor_train=RULE):
            weights.update(answer["weights"])
        found.append(weights)
    one, two = found
    assert one.keys() == two.keys()
    for name, weight in one.items():
        torch.testing.assert_close(torch.tensor(two[name]), torch.tensor(weight), rtol=1e-3, atol=1e-4, msg=name)


def test_a_resumed_run_ends_with_the_bits_of_an_uninterrupted_one(kept_world: Any, seed: int, tmp_path: Path) -> None:
    """The checkpoint has the cores and their states. Another number of ranks can read it."""
    arguments = {"seed": seed, "folder": str(tmp_path), "after": 9, "tensor_train": RULE}
    whole = kept_world(2).run(CASES, "save_then_train_on", before=15, **arguments)
    assert kept_world(2).run(CASES, "resume_and_train_on", **arguments) == whole
    assert kept_world(1).run(CASES, "resume_and_train_on", **arguments)[0][0] == whole[0][0]
