# SPDX-License-Identifier: Apache-2.0
"""The benchmark's own arithmetic, and a small run of it from end to end. No timing is asserted."""

import contextlib
import importlib
import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from sennit.commands.cli import app
from sennit.doctor import capabilities
from sennit.testbed.bench import ratios, results
from sennit.testbed.bench.cases import Case, Collective
from sennit.testbed.bench.samples import ingest
from sennit.testbed.bench.transport import collectives, rdma
from sennit.testbed.bench.transport.collectives import Settings
from sennit.testbed.bench.transport.conductor import WorkerError, Workers
from sennit.testbed.bench.transport.worker_commands import Join
from sennit.transport.sizes import format_size, parse_size


def test_arrays_of_numpy_have_the_pages_of_torchs_tensors() -> None:
    assert Settings(against=("openmpi",)).environment()["NUMPY_MADVISE_HUGEPAGE"] == "0"
    assert "NUMPY_MADVISE_HUGEPAGE" not in Settings(ours="sennit-core", against=("openmpi",)).environment()


@pytest.mark.parametrize(("text", "size_bytes"), [("4096", 4096), ("4KiB", 4096), (" 64 MiB ", 64 << 20), ("7B", 7)])
def test_sizes_are_read(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["", "KiB", "-4", "4KB", "4.5MiB", "4 KiB 3"])
def test_wrong_sizes_name_the_units(text: str) -> None:
    with pytest.raises(ValueError, match="KiB, MiB, GiB"):
        parse_size(text)


@pytest.mark.parametrize(("size_bytes", "text"), [(4096, "4 KiB"), (64 << 20, "64 MiB"), (4100, "4100 B"), (0, "0 B")])
def test_sizes_are_written(size_bytes: int, text: str) -> None:
    assert format_size(size_bytes) == text


@pytest.mark.parametrize(("run_s", "iterations"), [(20e-6, 2_000), (1e-3, 50), (0.2, 1)])
def test_lost_time_slices_do_not_make_the_samples_short(run_s: float, iterations: int) -> None:
    trials: list[int] = []

    def seconds_per_run(count: int) -> float:
        trials.append(count)
        stall_s = 0.004 if len(trials) <= 2 else 0.0
        return run_s + stall_s / count

    assert collectives.choose_iterations(seconds_per_run) == iterations
    assert len(trials) < 6


@pytest.mark.parametrize(
    ("collective", "elements"),
    [
        (Collective.ALLREDUCE, (1023, 1023)),
        (Collective.ALLTOALL, (1023, 1023)),
        (Collective.REDUCE_SCATTER, (1023, 341)),
        (Collective.ALL_GATHER, (341, 1023)),
    ],
)
def test_size_is_that_of_the_larger_buffer(collective: Collective, elements: tuple[int, int]) -> None:
    assert Case(collective, 4096).elements(3) == elements


def test_ratio_is_taken_round_by_round() -> None:
    # The machine slowed down threefold in the second round, so the ratio of the medians would be 6.
    row = results.Row(
        Case(Collective.ALLREDUCE, 4096), {"sennit": [1.0, 3.0, 1.0, 1.0], "gloo": [4.0, 12.0, 4.0, 12.0]}
    )
    assert row.ratio("gloo", "sennit") == 4.0
    assert row.median_s("sennit") == 1.0


def test_trainers_are_compared_turn_by_turn() -> None:
    turns = {
        "memory": [[1.0, 0.2], [3.0, 0.6], [1.0, 0.2]],
        "xdp://plane0:4800": [[0.5, 0.011], [1.5, 0.022], [1.25, 0.011]],
    }
    counters = {"xdp://plane0:4800": {"waited_s": 0.0125, "gaps": 2, "silences": 1}}
    memory, xdp = ingest.results({"batch_size": 100, "turns": turns, "counters": counters})
    assert (memory.source, memory.samples_per_s, memory.ratio_to_memory) == ("memory", 1100.0, 1.0)
    assert (xdp.source, xdp.samples_per_s, xdp.ratio_to_memory, xdp.input_ms) == ("xdp", 880.0, 2.0, 1.0)
    console = Console(file=io.StringIO(), width=100)
    ingest.render([memory, xdp], console)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().splitlines()[-1].split() == ["xdp", "880", "2.000", "1.00", "12.5", "3"]


def test_quantiles_interpolate() -> None:
    assert results.quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert results.quantile([0.0, 10.0], 0.1) == 1.0
    assert results.quantile([5.0], 0.9) == 5.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"world": 1}, "at least 2"),
        ({"rounds": 0}, "at least 1"),
        ({"against": ("nccl",)}, "sennit, symmetric, new-sizes, gloo, sennit-core, core-symmetric, openmpi"),
        ({"against": ("udp-bare",), "world": 3}, "of 2 ranks"),
        ({"sizes_bytes": (4,)}, "at least 8 B"),
        ({"hosts": 3}, "hosts 3: 1 to 2"),
        ({"hosts": 2, "transport": "udp"}, "more than one with transport auto"),
        ({"against": ("new-sizes",)}, "allowed: allreduce alone"),
        ({"against": ("core-int8-between",)}, "core-int8-between codes between hosts: 2 or more"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Settings(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(1.234e-6, "1.23 µs"), (0.9996e-3, "1 ms"), (0.9994e-3, "999 µs"), (0.0123, "12.3 ms"), (2, "2 s")],
)
def test_times_have_three_digits(seconds: float, text: str) -> None:
    assert ratios.format_seconds(seconds) == text


def sample_report() -> results.Report:
    rows = [
        results.Row(Case(collective, size), {"sennit": [1e-3, 2e-3], "gloo": [4e-3, 6e-3]})
        for collective in (Collective.ALLREDUCE, Collective.ALLTOALL)
        for size in (4096, 1 << 20)
    ]
    machine = {"processor": "a processor", "cores": 2, "load_average": [0.1, 0.2, 0.3]}
    return results.Report("sennit", {"world": 2, "transport": "shm", "rounds": 2}, machine, rows, 12 << 20)


def test_table_has_the_ratio_and_the_memory() -> None:
    out = io.StringIO()
    ratios.render(sample_report(), Console(file=out, width=160))
    assert "3.50×" in out.getvalue()
    assert "12.0 MiB" in out.getvalue()


def test_figure_is_drawn(tmp_path: Path) -> None:
    made = sample_report()
    # A peer without a colour of its own.
    for row in made.rows:
        row.samples_s["core-int8"] = [1e-3, 1e-3]
    ratios.plot(made, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_a_failing_worker_is_named_and_ends_the_run() -> None:
    with (
        pytest.raises(WorkerError, match="torch rank 0 failed at Join"),
        Workers(library="torch", world=1, environment={}) as workers,
    ):
        workers.ask(Join("no_such_backend"))


@pytest.mark.slow
@pytest.mark.needs("backend", "shm")
@pytest.mark.parametrize(
    "measured",
    [[Collective.ALLREDUCE], pytest.param(list(Collective), marks=pytest.mark.long)],
    ids=["one collective", "all"],
)
def test_small_run_from_end_to_end(measured: list[Collective]) -> None:
    against = ("gloo", "new-sizes") if measured == [Collective.ALLREDUCE] else ("gloo",)
    settings = Settings(world=2, collectives=tuple(measured), sizes_bytes=(4096,), rounds=2, against=against)
    seen: list[str] = []
    result = collectives.run(settings, lambda what, done, total: seen.append(what))
    assert len(result.rows) == len(measured)
    assert seen[-1] == "memory"
    assert result.memory_growth_bytes is not None
    for row in result.rows:
        assert {peer: len(samples) for peer, samples in row.samples_s.items()} == dict.fromkeys(("sennit", *against), 2)
    assert json.loads(json.dumps(result.as_json()))["rows"][0]["collective"] == "allreduce"


@pytest.mark.slow
@pytest.mark.needs("backend", "shm")
@pytest.mark.parametrize(
    ("transport", "world", "hosts", "against"),
    [
        ("shm", 2, 1, ("core-mx4", "core-fp8")),
        pytest.param("auto", 4, 2, ("core-int8", "core-int8-between"), marks=pytest.mark.long),
    ],
)
def test_codecs_are_columns(transport: str, world: int, hosts: int, against: tuple[str, ...]) -> None:
    settings = Settings(
        ours="sennit-core",
        transport=transport,
        world=world,
        hosts=hosts,
        against=against,
        sizes_bytes=(64 << 10,),
        rounds=1,
    )
    result = collectives.run(settings, lambda what, done, total: None)
    assert [set(row.samples_s) for row in result.rows] == [{"sennit-core", *against}] * len(Collective)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rounds": 0}, "at least 1"),
        ({"in_flight": ()}, "1 to 16"),
        ({"in_flight": (1, 17)}, "1 to 16"),
        ({"against": ("gloo",)}, "known are udp, kernel-rc"),
        ({"part_bytes": 2}, "too small"),
    ],
)
def test_wrong_settings_of_the_rdma_benchmark_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rdma.Settings(**settings)  # type: ignore[arg-type]


def test_a_machine_without_the_links_is_told_where_to_run_the_rdma_benchmark() -> None:
    with pytest.raises(rdma.Unusable, match="sennit testbed vm -- sennit bench rdma"):
        rdma.check_devices()


@pytest.mark.parametrize(
    ("netem", "delay_s"),
    [("", 0.0), ("loss 1%", 0.0), ("delay 5ms 2ms", 0.005), ("loss 1% delay 250us", 250e-6), ("delay 1.5s", 1.5)],
)
def test_the_mean_delay_is_read_from_netem(netem: str, delay_s: float) -> None:
    assert rdma.one_way_delay_s(netem) == delay_s


def test_goodput_is_compared_with_as_many_in_flight() -> None:
    def row(netem: str, in_flight: int, ours_s: float, theirs_s: float) -> rdma.Row:
        samples = {"verbs": [9.0, ours_s, 1e-9], "kernel-rc": [9.0, theirs_s, 1e-9]}
        return rdma.Row(netem=netem, in_flight=in_flight, samples_s=samples)

    rows = [row("", 1, 0.004, 0.001), row("delay 5ms", 1, 0.02, 0.022), row("", 8, 0.002, 0.001)]
    rows += [row("delay 5ms", 8, 0.004, 0.002), row("loss 1%", 8, 0.0025, 0.01)]
    made = rdma.Report(settings=rdma.Settings(part_bytes=1000), machine={}, rows=rows)
    assert made.goodput(rows[0], "verbs") == 250_000
    assert [made.kept(one, "verbs") for one in rows] == pytest.approx([1, 0.2, 1, 0.5, 0.8])
    assert made.of_ideal(rows[4], "verbs") is None
    # Three trips of 5 ms, and the 4 ms without delay. The kernel needs two trips.
    assert made.of_ideal(rows[1], "verbs") == pytest.approx(0.95)
    assert made.of_ideal(rows[1], "kernel-rc") == pytest.approx(0.5)
    # 17 ms for eight operations, and 11 ms for the kernel.
    assert made.of_ideal(rows[3], "verbs") == pytest.approx(0.53125)
    assert made.of_ideal(rows[3], "kernel-rc") == pytest.approx(0.6875)
    console = Console(file=io.StringIO(), width=160)
    rdma.render(made, console)


# Commands whose settings are beside code that imports torch, so that `--help` has their defaults once more.
SETTINGS = {
    "all": "comparison",
    "gpu": "gpu.gpu",
    **{name: f"transport.{name}" for name in ("collectives", "group", "rdma")},
    **{name: f"training.{name}" for name in ("cost", "overlap", "placements", "quality", "scaling", "sharded")},
    **{name: f"training.{name}" for name in ("slices", "timeline")},
}


@pytest.mark.needs("backend")
@pytest.mark.parametrize("name", SETTINGS)
def test_a_command_has_the_defaults_of_its_settings(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = f"sennit.testbed.bench.{SETTINGS[name]}"
    got = []

    def run(settings: object, *_: object, **__: object) -> None:
        got.append(settings)
        raise KeyError("it would measure now")

    monkeypatch.setattr(f"{module}.run", run)
    monkeypatch.setattr("sennit.testbed.bench.training.planner.calibrated", lambda ranks: contextlib.nullcontext())
    monkeypatch.setattr(capabilities, "missing", lambda *names: None)
    CliRunner().invoke(app, ["bench", name])
    assert got == [importlib.import_module(module).Settings()]
