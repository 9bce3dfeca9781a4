# SPDX-License-Identifier: Apache-2.0
"""Settings of tables and shardings from TOML files: what they make, and what is said about each kind of mistake."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from sennit.offload.ingest.facts import TableFacts
from sennit.runtime.kernels import Bounds, Decay, Optimizer, OptimizerSpec, Pooling, Precision, Rounding
from sennit.runtime.model.settings import SettingsFile, as_json, tables_of
from sennit.runtime.model.sharding_settings import Sharding, sharding_of
from sennit.runtime.sharded import Home, Table, place
from sennit.runtime.sharded.placement import SHARDINGS
from sennit.transport.errors import ConfigError

FACTS = [TableFacts(name=name, rows=rows, mean_length=1) for name, rows in (("user", 1000), ("item", 9))]
DEFAULTS = Table(
    name="template", rows=1, dim=4, optimizer=OptimizerSpec(weight_decay=0.5, max_gradient=2), row_shards=2
)
Tables = Callable[[str], tuple[Table, ...]]


@pytest.fixture
def tables(tmp_path: Path) -> Tables:
    """The tables that a file makes."""

    def made(text: str) -> tuple[Table, ...]:
        path = tmp_path / "tables.toml"
        path.write_text(text)
        return tables_of(FACTS, SettingsFile.read(path), DEFAULTS)

    return made


@pytest.fixture
def sharding(tmp_path: Path) -> Callable[[str], Sharding]:
    def made(text: str) -> Sharding:
        path = tmp_path / "sharding.toml"
        path.write_text(text)
        return sharding_of(str(path))

    return made


def test_without_a_file_tables_are_as_options_say(tables: Tables) -> None:
    plain = tuple(
        Table(name=fact.name, rows=fact.rows, dim=4, optimizer=DEFAULTS.optimizer, row_shards=2) for fact in FACTS
    )
    assert tables_of(FACTS, None, DEFAULTS) == plain
    assert tables("") == plain


def test_a_table_can_have_every_setting(tables: Tables) -> None:
    user, item = tables(
        """
        [tables.user]
        dim = 12
        precision = "bf16"
        pooling = "mean"
        rounding = "nearest"
        bounds = "wrap"
        row_shards = 8
        column_shards = 3
        home = "file"
        initial = { kind = "normal", deviation = 0.5 }
        [tables.user.optimizer]
        kind = "partial_row_wise_adam"
        epsilon = 1e-6
        beta1 = 0.5
        beta2 = 0.75
        weight_decay = 1
        decay = "decoupled"
        max_gradient = inf
        max_gradient_norm = 3
        """
    )
    assert item == tables_of(FACTS, None, DEFAULTS)[1]
    assert user.initial is not None
    rows = torch.empty(4000, 12)
    user.initial(rows, torch.Generator().manual_seed(1))
    assert 0.49 < float(rows.std()) < 0.51
    optimizer = OptimizerSpec(
        kind=Optimizer.PARTIAL_ROW_WISE_ADAM,
        epsilon=1e-6,
        beta1=0.5,
        beta2=0.75,
        weight_decay=1,
        decay=Decay.DECOUPLED,
        max_gradient=None,
        max_gradient_norm=3,
    )
    assert user == Table(
        name="user",
        rows=1000,
        dim=12,
        pooling=Pooling.MEAN,
        precision=Precision.BF16,
        optimizer=optimizer,
        rounding=Rounding.NEAREST,
        bounds=Bounds.WRAP,
        initial=user.initial,
        row_shards=8,
        column_shards=3,
        home=Home.FILE,
    )


def test_what_a_section_leaves_out_is_as_in_defaults_and_options(tables: Tables) -> None:
    user, item = tables(
        """
        [defaults]
        dim = 8
        optimizer = "adam"
        [tables.item]
        row_shards = 1
        optimizer = { beta2 = 0.5, max_gradient_norm = 1 }
        """
    )
    adam = OptimizerSpec(kind=Optimizer.ADAM, weight_decay=0.5, max_gradient=2)
    assert (user.dim, user.row_shards, user.optimizer) == (8, 2, adam)
    assert (item.dim, item.row_shards) == (8, 1)
    assert item.optimizer == OptimizerSpec(
        kind=Optimizer.ADAM, beta2=0.5, weight_decay=0.5, max_gradient=2, max_gradient_norm=1
    )


def test_an_optimizer_of_a_section_by_its_name(tables: Tables) -> None:
    """AdamW brings its weight decay. A kind does not take over what only the kind before it has."""
    user, item = tables(
        """
        [defaults]
        optimizer = { kind = "sgd", momentum = 0.9, nesterov = true }
        [tables.user]
        optimizer = "adamw"
        """
    )
    limits: dict[str, Any] = {"max_gradient": 2}
    assert user.optimizer == OptimizerSpec.named("adamw", **limits)
    assert item.optimizer == OptimizerSpec.named("sgd", momentum=0.9, nesterov=True, weight_decay=0.5, **limits)


@pytest.mark.parametrize(
    ("text", "low", "high"),
    [
        ('"uniform"', -(1000**-0.5), 1000**-0.5),
        ('{ kind = "uniform", bound = 0.25 }', -0.25, 0.25),
        ('"zeros"', 0.0, 0.0),
    ],
)
def test_initial_values(tables: Tables, text: str, low: float, high: float) -> None:
    user = tables(f"[tables.user]\ninitial = {text}")[0]
    described = as_json([user])[0]["initial"]
    assert described.get("bound", 0) == high
    if user.initial is not None:
        rows = torch.full((2000, 4), 7.0)
        user.initial(rows, torch.Generator().manual_seed(1))
        assert low <= float(rows.min()) <= 0.95 * low
        assert 0.95 * high <= float(rows.max()) <= high


def test_a_tensor_train_is_one_shard(tables: Tables) -> None:
    text = """
        [defaults]
        row_shards = 8
        column_shards = 2
        initial = "zeros"
        train_rank = 3
        home = "file"
        [tables.item]
        train_rank = 0
        """
    user, item = tables(text)
    assert (user.train_rank, user.row_shards, user.column_shards, user.initial) == (3, 1, 1, None)
    assert (item.train_rank, item.row_shards, item.column_shards) == (None, 8, 2)
    assert (user.home, item.home) == (None, Home.FILE)
    described = as_json((user, item))
    assert [one["train_rank"] for one in described] == [3, None]
    assert [one["initial"] for one in described] == [None, {"kind": "zeros"}]
    with pytest.raises(ConfigError, match=r"tables.toml: table user: row_shards 2; allowed: 1 with a train_rank"):
        tables(text + "[tables.user]\nrow_shards = 2")
    with pytest.raises(ConfigError, match=r"tables.toml: table user: home file with a train_rank; allowed: dram, hbm"):
        tables(text + '[tables.user]\nhome = "file"')


def test_a_tensor_train_lies_whole_on_a_rank(tables: Tables, sharding: Callable[[str], Sharding]) -> None:
    model = tables("[tables.user]\ntrain_rank = 3")
    assert sharding_of("row_wise").placement(model, 2) == place(model, 2, {"item": "row_wise"})
    assert sharding_of("data_parallel").placement(model, 2) == place(model, 2, "data_parallel")
    assert sharding('[tables]\nuser = "grid"').placement(model, 2) == place(model, 2)


def test_the_manifest_gets_every_setting(tables: Tables) -> None:
    user, item = as_json(tables('[tables.user]\nprecision = "fp16"\ninitial = "zeros"'))
    assert json.loads(json.dumps([user, item])) == [user, item]
    # A run may go on with its tables elsewhere, and at other rates.
    assert set(user) == {one.name for one in fields(Table)} - {"home", "lr", "ids"}
    (dynamic, _) = as_json(tables("[tables.user]\nids = { admit_after = 2 }\nrows = 7"))
    rules = {"admit_after": 2, "eviction": "lru", "evicted_share": 1 / 16, "expire_after": None, "unadmitted": "own"}
    assert dynamic["ids"] == rules
    assert dynamic["rows"] == 7
    assert set(user["optimizer"]) == {one.name for one in fields(OptimizerSpec)}
    assert (user["precision"], user["initial"]) == ("fp16", {"kind": "zeros"})
    assert (item["precision"], item["initial"]) == ("fp32", {"kind": "uniform", "bound": 1 / 3})
    assert (item["optimizer"]["kind"], item["rows"], item["features"]) == ("row_wise_adagrad", 9, ["item"])
    with pytest.raises(ConfigError, match="table a: initial"):
        as_json([Table(name="a", rows=1, dim=1, initial=lambda rows, generator: None)])


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("[tables.user", "tables.toml: "),
        ("[default]", "tables.toml: unknown key 'default'; allowed: defaults, tables; did you mean defaults?"),
        ("defaults = 3", "tables.toml: defaults is 3; allowed: a section"),
        ("[tables]\nuser = 3", "tables.toml: table user is 3; allowed: a section"),
        ("[tables.usr]", "tables.toml: table usr, which the data has not; allowed: user, item; did you mean user?"),
        ("[tables.user]\nprecison = 1", "tables.toml: table user: unknown key 'precison'; allowed: dim, precision, "),
        ("[defaults]\ndim = true", "tables.toml: defaults: dim True; allowed: an integer from 1 to "),
        ("[defaults]\ndim = 0", "defaults: dim 0; allowed: an integer from 1 to "),
        ("[defaults]\nrow_shards = 1.5", "defaults: row_shards 1.5; allowed: an integer from 1 to 4096"),
        ('[tables.user]\nprecision = "fp8"', "user: precision 'fp8'; allowed: fp32, fp16, bf16"),
        ('[tables.user]\npooling = "none"', "user: pooling 'none'; allowed: sum, mean"),
        ('[tables.user]\nhome = "disk"', "user: home 'disk'; allowed: file, dram, hbm"),
        ("[tables.user]\nbounds = 1", "user: bounds 1; allowed: error, wrap, ignore"),
        ("[tables.user]\noptimizer = 1", "user: optimizer is 1; allowed: a name, or a section with kind and options"),
        ('[tables.user]\noptimizer = "adem"', "optimizer: kind 'adem'; allowed: sgd, .*; did you mean adam?"),
        ("[tables.user]\noptimizer = {beta3 = 1}", "optimizer: unknown key 'beta3'; allowed: kind, epsilon, beta1, "),
        ("[tables.user]\noptimizer = {beta1 = 1}", "optimizer: beta1 1; allowed: 0 to below 1"),
        (
            '[tables.user]\noptimizer = {kind = "adam", momentum = 0.9}',
            "table user: optimizer: momentum 0.9; allowed: 0.0 for adam",
        ),
        ('[tables.user]\noptimizer = {kind = "sgd", nesterov = 1}', "nesterov 1; allowed: true, false"),
        ("[tables.user]\noptimizer = {epsilon = nan}", "optimizer: epsilon nan; allowed: 0 or more"),
        ("[tables.user]\noptimizer = {max_gradient = 0}", "max_gradient 0; allowed: above 0; inf: no limit"),
        ('[tables.user]\ninitial = "normal"', "initial: normal without deviation"),
        ("[tables.user]\ninitial = {bound = 1}", "initial: kind None; allowed: uniform, normal, zeros"),
        ('[tables.user]\ninitial = {kind = "zeros", bound = 1}', "initial: unknown key 'bound'; allowed: kind"),
        ('[tables.user]\ninitial = {kind = "uniform", bound = 0}', "initial: bound 0; allowed: above 0"),
        ("[tables.user]\ntrain_rank = -1", "table user: train_rank -1; allowed: an integer from 0 to 4096"),
        ("[tables.user]\ncolumn_shards = 5", "tables.toml: table user: column_shards 5; allowed: 1 to 4"),
        ("[tables.user]\ndim = 5000", "tables.toml: table user: dim 5000; .* give more column_shards"),
    ],
)
def test_what_is_wrong_with_settings_is_said(tables: Tables, text: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what.replace("?", r"\?")):
        tables(text)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent.toml: .*No such file"):
        SettingsFile.read(tmp_path / "absent.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\x00")
    with pytest.raises(ConfigError, match=r"binary.toml: 'utf-8' codec"):
        SettingsFile.read(tmp_path / "binary.toml")


@pytest.mark.parametrize("name", SHARDINGS)
def test_a_sharding_by_name(name: str) -> None:
    model = [Table(name=fact.name, rows=fact.rows, dim=4, row_shards=4, column_shards=4) for fact in FACTS]
    assert sharding_of(name).placement(model, 4, local_ranks=2) == place(model, 4, name, local_ranks=2)


def test_a_sharding_for_each_table(tables: Tables, sharding: Callable[[str], Sharding]) -> None:
    model = tables("")
    found = sharding('default = "data_parallel"\n[tables]\nuser = "row_wise"').placement(model, 2)
    assert found == place(model, 2, {"user": "row_wise", "item": "data_parallel"})
    assert sharding("").placement(model, 2) == place(model, 2, "table_wise")


def test_a_plan(tables: Tables, sharding: Callable[[str], Sharding]) -> None:
    model = tables("[tables.item]\nrow_shards = 1")
    found = sharding('[shards]\n"user/0.0" = 2\n"user/1.0" = 0\n"item/0.0" = -1')
    placement = found.placement(model, 3)
    assert [placement.owner_of[shard] for shard in sorted(placement.owner_of)] == [2, 0, -1]
    with pytest.raises(ConfigError, match=r"sharding.toml: shard user/0.0 on rank 2; allowed: -1 .* 0 to 1"):
        found.placement(model, 2)
    with pytest.raises(ConfigError, match=r"sharding.toml: the placement does not place item/1.0"):
        found.placement(tables(""), 3)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ('default = "rowwise"', "sharding.toml: default 'rowwise'; allowed: table_wise, .*; did you mean row_wise?"),
        ("[tables]\nuser = 1", "sharding.toml: tables: user 1; allowed: table_wise, row_wise, "),
        (
            '[tables]\nusr = "row_wise"',
            "sharding.toml: a sharding for table usr, which the model has not; .*did you mean user?",
        ),
        ("[table]", "unknown key 'table'; allowed: default, tables, shards, plan; did you mean table"),
        ('[shards]\n"user/0.0" = -2', "shards: user/0.0 -2; allowed: an integer from -1 to 4095"),
        ('default = "row_wise"\n[shards]', "sharding.toml: shards with default or tables; allowed: one of them"),
    ],
)
def test_what_is_wrong_with_a_sharding_is_said(
    tables: Tables, sharding: Callable[[str], Sharding], text: str, what: str
) -> None:
    with pytest.raises(ConfigError, match=what.replace("?", r"\?")):
        sharding(text).placement(tables(""), 2)


def test_a_sharding_that_does_not_exist() -> None:
    with pytest.raises(ConfigError, match=r"--sharding 'rowwise'; allowed: .*ends in .toml; did you mean row_wise\?"):
        sharding_of("rowwise")
    with pytest.raises(ConfigError, match=r"absent.toml: .*No such file"):
        sharding_of("absent.toml")


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("row_wise", "row_shards"),
        ("table_row_wise", "row_shards"),
        ("column_wise", "column_shards"),
        ("table_column_wise", "column_shards"),
        ("grid", "row_shards or column_shards"),
    ],
)
def test_a_table_of_one_shard_cannot_be_spread(name: str, setting: str) -> None:
    def model(**shards: Any) -> list[Table]:
        return [Table(name=fact.name, rows=fact.rows, dim=4, **shards) for fact in FACTS]

    with pytest.raises(
        ConfigError, match=f"--sharding: table user: sharding {name}, .*; allowed: {setting} of 2 or more"
    ):
        sharding_of(name).placement(model(), 2)
    sharding_of(name).placement(model(), 1)
    # One that can be spread is enough: the others lie whole.
    spread = [*model()[:1], *model(row_shards=2, column_shards=2)[1:]]
    assert sharding_of(name).placement(spread, 2) == place(spread, 2, name)
    for key in setting.split(" or "):
        sharding_of(name).placement(model(**{key: 2}), 2)
    if name.startswith("table_"):
        sharding_of(name).placement(model(), 2, local_ranks=1)


PAGE = Path(__file__).parents[2] / "docs" / "reference" / "models.md"


def test_files_of_the_page_are_right(tmp_path: Path) -> None:
    texts = re.findall(r"^```toml\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    paths = [tmp_path / f"{number}.toml" for number in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text)
    settings, names, plan = paths
    facts = [TableFacts(name=name, rows=50, mean_length=1) for name in ("tailnum", "carrier", "hour")]
    tailnum, carrier, hour = tables_of(facts, SettingsFile.read(settings), Table(name="template", rows=1, dim=4))
    assert (hour.dim, tailnum.precision, tailnum.optimizer.kind) == (16, Precision.FP16, Optimizer.ADAM)
    assert (carrier.row_shards, carrier.column_shards, carrier.optimizer.max_gradient) == (8, 2, 1)
    model = [tailnum, carrier, hour]
    shardings = {"tailnum": "row_wise", "carrier": "data_parallel"}
    assert sharding_of(str(names)).placement(model, 2) == place(model, 2, shardings)
    small = [Table(name="tailnum", rows=50, dim=4, row_shards=2), Table(name="carrier", rows=9, dim=4)]
    assert sharding_of(str(plan)).placement(small, 2).shards_on(1)
