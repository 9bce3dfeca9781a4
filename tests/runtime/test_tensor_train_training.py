# SPDX-License-Identifier: Apache-2.0
"""Training with tables in tensor-train form: the choice of tables, their owners, bits, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sennit.runtime.kernels.tensor_train import TensorTrainSpec
from sennit.runtime.model.tensor_train import TensorTrainRule
from sennit.runtime.sharded.tables import Table, shard_spec, shards_of
from sennit.runtime.training.report import EmbeddingSize
from sennit.transport.errors import ConfigError
from tests.runtime.trainer_runs import resume_and_train_on, save_then_train_on, train
from tests.runtime.world import WorldFactory

# This rule takes the first and the last of the tables of 20, 6 and 24 rows.
RULE = "10:2"


def table(name: str, rows: int) -> Table:
    return Table(name=name, rows=rows, dim=16, row_shards=4)


def test_large_tables_become_tensor_trains_where_it_makes_them_smaller() -> None:
    rule = TensorTrainRule.parse("1000:4")
    assert rule == TensorTrainRule(rows_at_least=1000, rank=4)
    small, large = rule.applied([table("small", 999), table("large", 1000)])
    assert small == table("small", 999)
    # A train is one shard.
    assert (large.train_rank, large.row_shards, large.rows) == (4, 1, 1000)
    # At rank 200 the cores of so few rows are larger than the table.
    wide = TensorTrainRule(rows_at_least=1, rank=200)
    assert wide.applied([small]) == (small,)
    own = Table(name="own", rows=5000, dim=16, train_rank=2)
    assert rule.applied([own]) == (own,)


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
    with pytest.raises(ConfigError, match=r"table a.*: numbers in a slice of core 2 .* 10000; allowed: 1 to 4096"):
        rule.applied([table("a", 10_000_000)])


def test_report_says_what_is_saved() -> None:
    rule = TensorTrainRule(rows_at_least=1000, rank=4)
    tables = rule.applied([table("a", 100_000), table("b", 10)])
    size = EmbeddingSize.of(tables)
    train = shard_spec(tables, shards_of(tables)[0])
    assert isinstance(train, TensorTrainSpec)
    assert (size.tables, size.tensor_trains) == (2, 1)
    assert size.table_numbers == 100_010 * 16
    assert size.stored_numbers == train.parameter_count + 160
    ratio = size.table_numbers / size.stored_numbers
    text = f"2 tables, 1,600,160 numbers; {size.stored_numbers:,} stored ({ratio:.1f} times fewer): 1 tensor train"
    assert str(size) == text
    assert str(EmbeddingSize.of(tables[1:])) == "1 tables, 160 numbers"


def test_trains_have_the_same_bits_wherever_they_are(kept_world: WorldFactory, seed: int) -> None:
    arguments: dict[str, Any] = {"seed": seed, "steps": 8, "tensor_train": RULE}
    found = [kept_world(size).run(train, **arguments) for size in (1, 2, 3)]
    for name in ("user", "hour"):
        cores = {f"tables.{name}/0.0.core{number}.weight" for number in (1, 2, 3)}
        assert sum(cores <= answer["weights"].keys() for answer in found[1]) == 1
    assert sum("tables.genre/0.0.weight" in answer["weights"] for answer in found[1]) == 1
    found.append(kept_world(2).run(train, sharding="data_parallel", **arguments))
    assert len({answer["sha256"] for answers in found for answer in answers}) == 1
    plain = kept_world(1).run(train, seed=seed, steps=8)
    assert plain[0]["sha256"] != found[0][0]["sha256"]


def test_a_resumed_run_ends_with_the_bits_of_an_uninterrupted_one(
    kept_world: WorldFactory, seed: int, tmp_path: Path
) -> None:
    """The checkpoint has the cores and their states. Any number of ranks reads it."""
    arguments: dict[str, Any] = {"seed": seed, "folder": str(tmp_path), "after": 9, "tensor_train": RULE}
    whole = kept_world(2).run(save_then_train_on, before=15, **arguments)
    assert kept_world(2).run(resume_and_train_on, **arguments) == whole
    assert kept_world(1).run(resume_and_train_on, **arguments)[0] == whole[0]
