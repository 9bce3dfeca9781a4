# SPDX-License-Identifier: Apache-2.0
"""The planner: what its model counts, that its search never does worse than what it starts from, and bad input."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from sennit.commands.cli import app
from sennit.runtime.calibrate.kernel_speeds import non_negative
from sennit.runtime.kernels.optimizers import OptimizerSpec
from sennit.runtime.model.sharding_settings import sharding_of
from sennit.runtime.planner import plan_file
from sennit.runtime.planner.cluster import Cluster, read_cluster
from sennit.runtime.planner.constants import Constants, OptimizerStep, Sharing, as_json, read_constants
from sennit.runtime.planner.problem import Fixed, Problem
from sennit.runtime.planner.search import Found, exact, greedy, local, of_placement, rate, round_robin, search
from sennit.runtime.planner.step_time import Kind, Rating
from sennit.runtime.planner.usage import assumed, counted, uses
from sennit.runtime.sharded.placement import EVERYWHERE, place
from sennit.runtime.sharded.tables import DynamicIds, Home, Shard, Table, shard_bytes, shards_of
from sennit.transport.codecs import Codec, CodecKind
from sennit.transport.errors import ConfigError
from tests.extent import examples

HERE = Cluster(ranks=2, local_ranks=2, cores=2)


def problem(tables: list[Table], lengths: list[float], *, ranks: int = 4, **options: Any) -> Problem:
    cluster = {"local_ranks": ranks, "cores": ranks} | {
        name: options.pop(name) for name in ("local_ranks", "cores", "limits") if name in options
    }
    return Problem(
        tables=tuple(tables),
        uses=tuple(uses(tables, lengths, None, 1.0)),
        cluster=Cluster(ranks=ranks, **cluster),
        constants=Constants(),
        batch=options.pop("batch", 4096),
        slices=options.pop("slices", 8),
        **options,
    )


@st.composite
def problems(draw: st.DrawFn, tables_max: int, *, has_limits: bool = False) -> Problem:
    count = draw(st.integers(1, tables_max))
    ranks = draw(st.sampled_from([1, 2, 3, 4, 8]))
    tables = [
        Table(
            name=f"t{number}",
            rows=draw(st.integers(1, 200_000)),
            dim=draw(st.sampled_from([4, 16, 64])),
            row_shards=draw(st.sampled_from([1, 1, 4])),
            column_shards=draw(st.sampled_from([1, 1, 2])),
        )
        for number in range(count)
    ]
    local = draw(st.sampled_from([one for one in range(1, ranks + 1) if ranks % one == 0]))
    options: dict[str, Any] = {"local_ranks": local, "cores": draw(st.sampled_from([1, 2, 8]))}
    if has_limits:
        sizes = [shard_bytes(tables, shard) for shard in shards_of(tables)]
        share = draw(st.floats(0.7, 3.0))
        options["limits"] = [int(share * sum(sizes) / ranks)] * ranks
    return problem(tables, [float(draw(st.integers(1, 50))) for _ in tables], ranks=ranks, **options)


@examples(4)
@given(problems(8))
def test_the_search_is_never_slower_than_greedy_round_robin_or_a_named_sharding(given_problem: Problem) -> None:
    rating = Rating(given_problem)
    best = search(rating).best
    tables, ranks = given_problem.tables, given_problem.cluster.ranks
    for other in (greedy(rating), round_robin(rating), of_placement(rating, "", place(tables, ranks))):
        assert best.seconds <= other.seconds * (1 + 1e-9)
    assert best.seconds == pytest.approx(rate(rating, "", best.owners).seconds)


@examples(6)
@given(problems(4))
def test_exact_search_is_at_least_as_good_as_local_search(given_problem: Problem) -> None:
    rating = Rating(given_problem)
    found = local(rating, greedy(rating))
    best = exact(rating, found)
    if best is not None:
        assert best.seconds <= found.seconds * (1 + 1e-9)


def test_exact_search_finds_what_trying_everything_finds() -> None:
    given_problem = problem([Table(name=f"t{n}", rows=10 ** (n + 1), dim=16) for n in range(4)], [30.0, 9, 20, 3])
    given_problem = dataclasses.replace(given_problem, cluster=Cluster(ranks=2, local_ranks=2, cores=2))
    rating = Rating(given_problem)
    all_of_them = [
        rate(rating, "", [np.full((1, 1), rank) for rank in ranks]).seconds
        for ranks in itertools.product((-1, 0, 1), repeat=4)
    ]
    best = exact(rating, greedy(rating))
    assert best is not None
    assert best.seconds == pytest.approx(min(all_of_them), rel=1e-5)


@examples(5)
@given(problems(6, has_limits=True))
def test_no_rank_gets_more_than_its_memory(given_problem: Problem) -> None:
    rating = Rating(given_problem)
    try:
        best: Found | None = search(rating).best
    except ConfigError as error:
        refused = str(error)
        best = None
    if best is None:
        assert "tier memory" in refused
        assert "table t" in refused or "shard t" in refused
        return
    limits = given_problem.cluster.limits
    assert limits is not None
    held = [0] * given_problem.cluster.ranks
    placement = best.placement(rating)
    for rank in range(given_problem.cluster.ranks):
        held[rank] = sum(shard_bytes(given_problem.tables, shard) for shard in placement.shards_on(rank))
    assert all(size <= limit for size, limit in zip(held, limits, strict=True))


def test_tables_count_where_their_homes_are() -> None:
    """Files hold one table, and memory beside the cache two, which only fit on different ranks."""
    tables = [
        Table(name="file", rows=4000, dim=16, home=Home.FILE),
        Table(name="large", rows=1000, dim=16, home=Home.DRAM),
        Table(name="small", rows=900, dim=16, home=Home.DRAM),
    ]
    size = shard_bytes(tables, Shard(1, 0, 0))
    cluster = Cluster(ranks=2, local_ranks=2, cores=2, cache_bytes=1 << 16, beside=[size, size])
    given_problem = dataclasses.replace(problem(tables, [40.0, 5.0, 5.0], ranks=2), cluster=cluster)
    rating = Rating(given_problem)
    best = search(rating).best
    on = [int(owners.flat[0]) for owners in best.owners]
    # A file is never on every rank, whatever a copy would save.
    assert on[0] >= 0
    assert sorted(on[1:]) == [0, 1]
    assert best.work[Kind.MEMORY].sum() == shard_bytes(tables, Shard(0, 0, 0))
    assert sorted(best.work[Kind.OWN]) == [shard_bytes(tables, Shard(2, 0, 0)), size]
    assert (best.work[Kind.ROWS] > 0).tolist() == [rank == on[0] for rank in range(2)]
    small = dataclasses.replace(cluster, beside=[size - 1, size - 1])
    with pytest.raises(ConfigError, match=r"tier memory: table large .* for tables on rank 0, .* 1 bytes are miss"):
        search(Rating(dataclasses.replace(given_problem, cluster=small)))
    with pytest.raises(ConfigError, match="table file: home file without a table store; allowed: dram"):
        search(Rating(problem(tables, [40.0, 5.0, 5.0])))


def test_ids_of_a_table_in_a_file_count_in_memory() -> None:
    tables = [
        Table(name="file", rows=4000, dim=16, home=Home.FILE, ids=DynamicIds(admit_after=2)),
        Table(name="here", rows=1000, dim=16, home=Home.DRAM, ids="dynamic"),
    ]
    cluster = Cluster(ranks=2, local_ranks=2, cores=2, cache_bytes=1 << 16)
    given_problem = dataclasses.replace(problem(tables, [40.0, 5.0], ranks=2), cluster=cluster)
    work = search(Rating(given_problem)).best.work
    # Weights, and the sum of row-wise AdaGrad.
    assert work[Kind.MEMORY].sum() == 4000 * (16 + 1) * 4
    # 44.5 and 22.25 bytes a row, as docs/reference/dynamic-tables.md has them.
    assert work[Kind.OWN].sum() == 4000 * 44.5 + 1000 * ((16 + 1) * 4 + 22.25)


def test_the_same_problem_has_the_same_plan() -> None:
    given_problem = problem([Table(name=f"t{n}", rows=1000 * (n + 1), dim=16) for n in range(14)], [5.0] * 14)
    first, second = (search(Rating(given_problem)).best for _ in range(2))
    assert [one.tolist() for one in first.owners] == [one.tolist() for one in second.owners]


def test_a_table_that_is_used_most_is_alone() -> None:
    tables = [Table(name=f"t{n}", rows=100_000, dim=16) for n in range(8)]
    lengths = [40.0, *[5.0] * 7]
    # Uniform use: so many distinct rows that replicas do not pay.
    one = dataclasses.replace(problem(tables, lengths), uses=tuple(uses(tables, lengths, None, 0.0)))
    best = search(Rating(one)).best
    owner = best.owners[0].flat[0]
    assert owner >= 0
    assert all(owner not in one for one in best.owners[1:])


def test_row_shards_go_where_their_use_is_in_balance() -> None:
    """Nearly all ids are of the first eighth of the rows: contiguous ranges of equal size would be out of balance."""
    table = Table(name="t", rows=80_000, dim=32, row_shards=8)
    ids = np.concatenate([np.arange(10_000).repeat(20), np.arange(80_000)])
    use = counted(table, 40.0, ids)
    assert use.shares(8)[0] > 0.7
    one = problem([table], [40.0], batch=65_536)
    rating = Rating(dataclasses.replace(one, uses=(use,)))
    best, even = search(rating).best, of_placement(rating, "", place([table], 4, "row_wise"))
    assert best.seconds < 0.9 * even.seconds


def test_ranks_that_share_cores_take_turns() -> None:
    tables = [Table(name=f"t{n}", rows=1000, dim=16) for n in range(4)]
    slow, fast = (
        rate(Rating(problem(tables, [10.0] * 4, cores=cores)), "", [np.full((1, 1), n) for n in range(4)])
        for cores in (2, 4)
    )
    assert slow.phases["lookup"] == pytest.approx(2 * (1 + Constants().sharing.crowd) * fast.phases["lookup"])


def test_a_replica_with_row_shards_looks_every_bag_up_in_each() -> None:
    """Bags with few ids cost four times as much, and sums are added up. Replicas take something, however small."""
    whole, cut = (
        rate(
            Rating(problem([Table(name="t", rows=8, dim=16, row_shards=parts)], [0.01])), "", [np.full((parts, 1), -1)]
        )
        for parts in (1, 4)
    )
    assert 4 * whole.phases["lookup"] < cut.phases["lookup"]
    assert cut.phases["replicas"] > whole.phases["replicas"] > Constants().replicas.step_s


def test_the_next_batch_hides_on_idle_cores_alone() -> None:
    tables, fixed = [Table(name="t", rows=1000, dim=16)], Fixed(input_sample_s=1e-6, slice_s=1e-3)
    crowded, idle, serial = (
        rate(Rating(problem(tables, [10.0], cores=cores, fixed=fixed, ahead=ahead)), "", [np.zeros((1, 1), np.int64)])
        for cores, ahead in ((4, True), (8, True), (4, False))
    )
    assert idle.phases["input"] == idle.phases["id exchange"] == 0 < serial.phases["input"]
    assert crowded.seconds == pytest.approx((1 + Constants().sharing.switches) * serial.seconds)


def test_an_update_takes_longer_with_more_states() -> None:
    """A step of two tables by optimizer, on ranks and on all of them."""

    def seconds(optimizer: OptimizerSpec, owner: int, constants: Constants) -> float:
        tables = [Table(name=f"t{n}", rows=100_000, dim=64, optimizer=optimizer) for n in range(2)]
        given_problem = dataclasses.replace(problem(tables, [10.0] * 2, ranks=2), constants=constants)
        phases = rate(Rating(given_problem), "", [np.full((1, 1), owner)] * 2).phases
        return float(phases["update"] + phases["replicas"])

    measured = dataclasses.replace(
        Constants(),
        optimizers={
            "adam": OptimizerStep(row_s=1e-8, row_element_s=5e-10),
            "sgd": OptimizerStep(row_s=-1e-9, row_element_s=0.0),
            "sgd_momentum": OptimizerStep(row_s=0.0, row_element_s=2e-10),
        },
    )
    names = ("sgd", "row_wise_adagrad", "adagrad", "partial_row_wise_adam", "adam")
    for owner in (0, EVERYWHERE):
        built_in = [seconds(OptimizerSpec.named(name), owner, Constants()) for name in names]
        assert built_in == sorted(built_in)
        assert built_in[4] > 1.5 * built_in[1]
        sgd, row_wise, adam = (
            seconds(OptimizerSpec.named(name), owner, measured) for name in ("sgd", names[1], "adam")
        )
        assert row_wise == built_in[1]
        assert sgd < row_wise < adam
        momentum = OptimizerSpec.named("sgd", momentum=0.9)
        assert sgd < seconds(momentum, owner, measured) < adam
    rows = 2 * float(uses([Table(name="t", rows=100_000, dim=64)], [10.0], None, 1.0)[0].distinct(40_960, 1)[0])
    adam, row_wise = (seconds(OptimizerSpec.named(name), 0, measured) for name in ("adam", "row_wise_adagrad"))
    assert adam - row_wise == pytest.approx(rows * (1e-8 + 64 * 5e-10) * 1.1)


def test_a_codec_saves_bytes_and_takes_a_processor() -> None:
    """Two hosts: a slow network gains by it, a fast one loses."""
    tables = [Table(name=f"t{n}", rows=1_000, dim=32, optimizer=kind) for n, kind in enumerate(("adam", "sgd"))]

    def rated(codec: Codec | None, gbit: float) -> Found:
        given_problem = dataclasses.replace(
            problem(tables, [1.0] * 2, ranks=2, fixed=Fixed(gradient_bytes=1 << 20)),
            cluster=Cluster(ranks=2, local_ranks=1, cores=1, gbit=gbit),
            codec=codec,
            gradient_codec=codec,
        )
        return rate(Rating(given_problem), "", [np.full((1, 1), number) for number in range(2)])

    int8 = Codec(kind=CodecKind.INT8)
    for phase in ("pooled exchange", "gradient exchange", "AllReduce"):
        assert rated(int8, 1).phases[phase] < 0.4 * rated(None, 1).phases[phase]
        assert rated(int8, 1e6).phases[phase] > 1.1 * rated(None, 1e6).phases[phase]
    for phase in ("id exchange", "lookup", "update", "dense"):
        assert rated(int8, 1).phases[phase] == rated(None, 1).phases[phase]
    plain, coded = (rated(codec, 1).work for codec in (None, int8))
    # A row of 32 elements is a block, and has a scale of 4 bytes.
    for kind in (Kind.SUMS_SENT, Kind.GRADIENTS_SENT):
        assert coded[kind].tolist() == [value * 36 / 128 for value in plain[kind]]


def test_a_step_alone_exchanges_nothing() -> None:
    found = greedy(Rating(problem([Table(name="t", rows=100, dim=8)], [1.0], ranks=1, fixed=Fixed(slice_s=1e-3))))
    assert found.phases["pooled exchange"] == found.phases["AllReduce"] == 0
    assert found.phases["dense"] == pytest.approx(8e-3)


def test_work_is_the_sum_over_tables_and_counts_what_travels() -> None:
    tables = [Table(name="a", rows=100, dim=8), Table(name="b", rows=50, dim=4, row_shards=2, column_shards=2)]
    rating = Rating(problem(tables, [3.0, 2.0], ranks=2))
    # Row shard 1 of b is on rank 1, all else on rank 0.
    owners = [np.zeros((1, 1), np.int64), np.array([[0, 0], [1, 1]])]
    work = rating.total(owners)
    assert work[Kind.SUMS_SENT].tolist() == [4 * (8 + 4), 4 * 4]
    assert work[Kind.GRADIENTS_SENT].tolist() == [4 * (8 + 4), 4 * 4]
    # Ids of 4 bytes, and a length for each part.
    shares = rating.problem.uses[1].shares(2)
    assert work[Kind.IDS_SENT] == pytest.approx([3 * 4 + 4 + 2 * shares[0] * 4 + 4, 2 * shares[1] * 4 + 4])
    assert work[Kind.MEMORY].sum() == sum(shard_bytes(tables, shard) for shard in shards_of(tables))


@given(st.integers(1, 100_000), st.sampled_from([1, 4, 8]), st.sampled_from([0.0, 0.7, 1.0, 1.4]))
@examples(8)
def test_assumed_use_has_all_rows_and_all_ids(rows: int, shards: int, exponent: float) -> None:
    use = assumed(Table(name="t", rows=rows, dim=4, row_shards=shards), 1.0, exponent)
    assert use.rows.sum() == pytest.approx(rows)
    assert use.shares(shards).sum() == pytest.approx(1)
    assert use.distinct(1e12, shards).sum() == pytest.approx(rows, rel=1e-3)
    assert use.distinct(1.0, shards).sum() <= 1 + 1e-9


def test_distinct_rows_are_about_those_of_a_batch() -> None:
    dice = np.random.default_rng(1)
    ids = (dice.pareto(1.1, 400_000) * 3).astype(np.int64).clip(max=99_999)
    use = counted(Table(name="t", rows=100_000, dim=4, row_shards=4), 1.0, ids)
    batch = dice.choice(ids, 20_000)
    assert use.distinct(20_000, 4).sum() == pytest.approx(len(np.unique(batch)), rel=0.03)


def test_least_squares_find_constants_that_are_not_negative() -> None:
    rows = np.random.default_rng(2).random((30, 3))
    assert non_negative(rows, rows @ [1.0, 0.0, 2.0]) == pytest.approx([1, 0, 2], abs=1e-6)
    assert (non_negative(rows, rows @ [1.0, -3.0, 2.0]) >= 0).all()


def calibration(path: Path, **changes: Any) -> Path:
    costs = {"round_s": 1e-6, "message_s": 1e-6, "byte_s": 1e-10, "peer_share": 0, "fold_byte_s": 1e-10}
    content = {
        "schema": 1,
        "date": "2026-01-01T00:00:00Z",
        "ways": {"shared_memory": costs, "network": costs},
        "kernels": as_json(Constants()),
    } | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
    return path


def test_a_file_of_an_earlier_version_has_the_network_and_says_what_it_lacks(tmp_path: Path) -> None:
    found, warnings = read_constants(str(calibration(tmp_path / "old.json", kernels=None)))
    assert found.network.network.byte_s == 1e-10
    assert not found.has_kernels
    assert len(warnings) == 2
    assert "days ago on this host" in warnings[0]
    assert "no kernels" in warnings[1]


def test_constants_that_a_file_lacks_keep_their_defaults(tmp_path: Path) -> None:
    kernels = as_json(dataclasses.replace(Constants(), sharing=Sharing(crowd=0.5, switches=0.25)))
    found, _ = read_constants(str(calibration(tmp_path / "new.json", kernels=kernels)))
    assert found.sharing == Sharing(crowd=0.5, switches=0.25)
    for name in ("sharing", "replicas"):
        del kernels[name]
    found, _ = read_constants(str(calibration(tmp_path / "old.json", kernels=kernels)))
    assert (found.sharing, found.replicas) == (Constants().sharing, Constants().replicas)


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        (("lookup", "fp32", "id_s"), -1, "kernels.lookup.fp32.id_s is -1"),
        (("update", "bf16", "row_s"), "fast", "kernels.update.bf16.row_s"),
        (("memory", "copy_byte_s"), float("nan"), "kernels.memory.copy_byte_s"),
        (("strange",), 1, "kernels.strange is unknown"),
        (("schema",), 9, "kernels.schema is 9"),
        (("overhead", "ids"), None, "kernels.overhead.ids"),
        (("sharing", "crowd"), -0.1, "kernels.sharing.crowd is -0.1"),
        (("contention",), 0.5, "kernels.contention is 0.5"),
        (("optimizers",), {"adm": {}}, "kernels.optimizers.adm is unknown"),
        (("optimizers",), {"adam": {"row_s": -2}}, "kernels.optimizers.adam.row_s is -2"),
    ],
)
def test_bad_constants_are_refused_by_name(tmp_path: Path, path: tuple[str, ...], value: Any, named: str) -> None:
    kernels = as_json(Constants())
    place: Any = kernels
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(ConfigError, match=named.replace(".", r"\.")):
        read_constants(str(calibration(tmp_path / "c.json", kernels=kernels)))


def test_a_plan_is_written_read_and_compared(tmp_path: Path) -> None:
    tables = [Table(name='a "b"', rows=10, dim=4), Table(name="c", rows=9, dim=2, row_shards=2)]
    first, second = tmp_path / "a.toml", tmp_path / "b.toml"
    plan_file.write(first, tables, HERE, {'a "b"/0.0': 1, "c/0.0": 0, "c/1.0": 1}, 0.01)
    plan_file.write(
        second, tables, Cluster(ranks=2, local_ranks=1, cores=1), {'a "b"/0.0': -1, "c/0.0": 0, "c/1.0": 0}, 0.02
    )
    placement = sharding_of(str(first)).placement(tables, 2)
    assert sorted(placement.owner_of.values()) == [0, 1, 1]
    assert plan_file.differences(plan_file.read(first), plan_file.read(second)) == [
        "ranks of a host: 2 -> 1",
        'shard a "b"/0.0: rank 1 -> every rank',
        "shard c/1.0: rank 1 -> rank 0",
    ]
    result = CliRunner().invoke(app, ["shard", "diff", str(first), str(second)])
    assert result.exit_code == 1
    assert "c/1.0: rank 1 -> rank 0" in result.output
    assert CliRunner().invoke(app, ["shard", "diff", str(first), str(first)]).exit_code == 0


def test_a_plan_for_another_model_or_cluster_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    plan_file.write(path, [Table(name="user", rows=10, dim=4)], HERE, {"user/0.0": 1}, 0.01)
    given_plan = sharding_of(str(path))
    with pytest.raises(ConfigError, match=r"table user is 10 x 4.* here it is 10 x 8"):
        given_plan.placement([Table(name="user", rows=10, dim=8)], 2)
    with pytest.raises(ConfigError, match="table item is not there"):
        given_plan.placement([Table(name="user", rows=10, dim=4), Table(name="item", rows=1, dim=4)], 2)
    with pytest.raises(ConfigError, match="is for 2 ranks, but there are 4"):
        given_plan.placement([Table(name="user", rows=10, dim=4)], 4)
    with pytest.raises(ConfigError, match="is for 2 ranks on each host, but there are 1"):
        given_plan.placement([Table(name="user", rows=10, dim=4)], 2, local_ranks=1)
    # Nobody knows how many ranks hosts have.
    given_plan.placement([Table(name="user", rows=10, dim=4)], 2, local_ranks=None)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('[plan]\nrank = 2\n[shards]\n"a/0.0" = 0', "plan: unknown key 'rank'"),
        ("[plan]\nranks = 0\n[shards]", "plan: ranks 0"),
        ("[plan]\nranks = 2", "plan without shards"),
        ("[plan.tables]\na = 3\n[shards]", "plan: tables: a 3"),
    ],
)
def test_a_bad_plan_is_refused_by_name(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "a.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=named):
        sharding_of(str(path))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("ranks = 4\nrack = 2", "unknown key 'rack'"),
        ("cores = 4", "ranks is missing"),
        ("ranks = 4\nlocal_ranks = 3", "local_ranks 3 for 4 ranks"),
        ('ranks = 4\nmemory = "much"', "memory 'much'"),
        ('ranks = 4\nfile = "1GiB"', "file without memory"),
        ("ranks = 4\ngbit = 0", "gbit 0"),
    ],
)
def test_a_bad_cluster_is_refused_by_name(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=named):
        read_cluster(path)


SMALL = ["--data", "synthetic", "--samples", "400", "--row-limit", "50", "--batch-size", "64", "--dim", "4"]


def test_the_command_plans_writes_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SENNIT_CALIBRATION", raising=False)
    plan, report = tmp_path / "plan.toml", tmp_path / "plan.json"
    arguments = ["shard", *SMALL, "--ranks", "4", "--output", str(plan), "--json", str(report)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "Predicted step" in result.output
    assert "round robin" in result.output
    found = json.loads(report.read_text())
    assert found["step_s"] == pytest.approx(sum(found["phases_s"].values()))
    assert found["shards"] == dict(sharding_of(str(plan)).shards or {})
    assert all(other["step_s"] >= found["step_s"] for other in found["others"])
    # An edited plan is rated, too. The size of what LOSSLESS codes is not known.
    result = CliRunner().invoke(
        app, ["shard", *SMALL, "--ranks", "4", "--sharding", str(plan), "--exchange", "lossless"]
    )
    assert result.exit_code == 0, result.output
    assert "planned as without a codec" in result.output


def test_a_described_cluster_without_room_is_refused_with_table_and_tier(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text('ranks = 2\nmemory = "1KiB"')
    result = CliRunner().invoke(app, ["shard", *SMALL, "--cluster", str(path)])
    assert result.exit_code != 0
    assert "cannot hold the model in tier memory" in result.output
    assert "table table_" in result.output


def test_a_planned_run_has_the_bits_of_any_other_and_says_what_it_expects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SENNIT_CALIBRATION", raising=False)
    hashes = set()
    for sharding in ("auto", "table_wise"):
        report = tmp_path / f"{sharding}.json"
        options = ["--ranks", "2", "--slices", "2", "--steps", "3", "--sharding", sharding, "--json", str(report)]
        if sharding == "auto":
            options += ["--rebalance", "1"]
        result = CliRunner().invoke(app, ["train", *SMALL, *options])
        assert result.exit_code == 0, result.output
        found = json.loads(report.read_text())
        hashes.add(found["weights_sha256"])
        assert (found["predicted_step_s"] is not None) == (sharding == "auto")
        assert found["rebalance"]["looks"] == (2 if sharding == "auto" else 0)
    assert len(hashes) == 1


def test_a_planned_run_without_room_ends_with_table_and_tier() -> None:
    result = CliRunner().invoke(
        app, ["train", *SMALL, "--ranks", "2", "--slices", "2", "--sharding", "auto", "--rank-memory", "1KiB"]
    )
    assert result.exit_code != 0
    assert "cannot hold the model in tier memory" in result.output
