# SPDX-License-Identifier: Apache-2.0
"""netem in place of the BPF program: the commands for tc, their results, and arrivals (if the kernel has netem)."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("pyroute2", reason="missing capability tc-bpf: pyroute2 is not installed")

from sennit.doctor import capabilities
from sennit.testbed.scenarios import runner
from sennit.testbed.scenarios.catalogue import SCENARIOS
from sennit.testbed.scenarios.results import Status
from sennit.testbed.topology import Direction, Impairer, Impairment, Planes, namespace, switch
from sennit.testbed.topology.netem import NetemCounters, NetemQueue, batch_line, parse_counters, why_not
from sennit.testbed.topology.netem_switch import NetemSwitch
from tests.testbed.datagrams import send_datagrams

COUNT = 5_000
MTU_BYTES = 9_000
# Impairment, delay, rate and its queue -> arguments for tc after `netem`.
GRAMMAR = [
    ({}, "limit 100000"),
    ({"impairment": Impairment(loss_fraction=0.01)}, "limit 100000 loss random 1%"),
    ({"impairment": Impairment(loss_fraction=1e-6)}, "limit 100000 loss random 0.0001%"),
    ({"impairment": Impairment(ecn_fraction=0.05)}, "limit 100000 loss random 5% ecn"),
    (
        {"impairment": Impairment(duplicate_fraction=0.02, corrupt_fraction=0.125), "delay_us": 250},
        "limit 100000 delay 250us corrupt 12.5% duplicate 2%",
    ),
    # Some packets overtake delayed ones. Without a delay there is nothing to overtake.
    (
        {"impairment": Impairment(reorder_fraction=0.05, reorder_depth=64)},
        "limit 100000 delay 1000us reorder 5%",
    ),
    (
        {"impairment": Impairment(reorder_fraction=0.05, reorder_depth=64), "delay_us": 5_000},
        "limit 100000 delay 5000us reorder 5%",
    ),
    ({"is_orphaning": True}, "limit 100000 delay 1us"),
    ({"is_orphaning": True, "delay_us": 70}, "limit 100000 delay 70us"),
    # 100 frames of 9,014 bytes in the queue, and 1 Gbit/s x 1 ms in flight.
    ({"bits_per_s": 10**9, "queue_bytes": 901_400}, "limit 100 rate 1000000000bit"),
    (
        {"bits_per_s": 10**9, "queue_bytes": 901_400, "delay_us": 1_000},
        "limit 114 delay 1000us rate 1000000000bit",
    ),
]


@pytest.mark.parametrize(("settings", "expected"), GRAMMAR)
def test_what_netem_is_told(settings: dict[str, object], expected: str) -> None:
    queue = NetemQueue(mtu_bytes=MTU_BYTES).with_(**settings)
    assert queue.words(seed=None) == expected.split()
    assert queue.words(seed=7) == [*expected.split(), "seed", "7"]
    line = batch_line("plane0", queue.words(seed=None))
    assert line == f"qdisc replace dev plane0 root handle 1: netem {expected}"


@pytest.mark.root
@pytest.mark.needs("netns", "tc")
@pytest.mark.parametrize(("settings", "expected"), [*GRAMMAR, ({}, "limit 100000 loss bernoulli 1%")])
def test_tc_understands_it(settings: dict[str, object], expected: str) -> None:
    """Works even if the kernel then refuses, because tc parses the whole line before it asks the kernel."""
    words = NetemQueue(mtu_bytes=MTU_BYTES).with_(**settings).words(seed=None)
    if "bernoulli" in expected:  # An unknown setting shows that the test can tell.
        words = expected.split()
    name = f"{namespace.unique_prefix(0)}-grammar"
    try:
        namespace.create(name)
        line = batch_line("lo", words).split()
        done = subprocess.run(["tc", "-n", name, *line], capture_output=True, text=True, timeout=20, check=False)
    finally:
        namespace.remove(name)
    is_understood = done.returncode == 0 or "Specified qdisc kind is unknown" in done.stderr
    assert is_understood == ("bernoulli" not in expected), done.stderr


def test_what_netem_cannot_do_is_named() -> None:
    assert why_not(Impairment(loss_fraction=0.1, corrupt_fraction=0.1)) is None
    assert "one or the other" in str(why_not(Impairment(loss_fraction=0.1, ecn_fraction=0.1)))
    assert "corrupt_skip_bytes" in str(why_not(Impairment(corrupt_fraction=0.1, corrupt_skip_bytes=5)))


def test_counters_as_tc_prints_them() -> None:
    shown = [
        {"kind": "clsact", "handle": "ffff:", "bytes": 1, "packets": 1, "drops": 1},
        {"kind": "netem", "handle": "1:", "root": True, "options": {"limit": 100_000, "ecn": False, "gap": 0},
         "bytes": 5_310_000, "packets": 4_950, "drops": 50, "requeues": 0, "backlog": 9_014, "qlen": 1},
    ]  # fmt: skip
    assert parse_counters(json.dumps(shown)) == NetemCounters(packets=4_950, bytes=5_310_000, dropped=50, waiting=1)
    assert parse_counters(json.dumps(shown[:1])) == NetemCounters(packets=0, bytes=0, dropped=0, waiting=0)


@pytest.mark.parametrize(
    ("here", "expected"),
    [({"tc-bpf", "netem"}, "bpf"), ({"tc-bpf"}, "bpf"), ({"netem"}, "netem"), (set(), "bpf")],
)
def test_auto_prefers_seeded_dice(here: set[str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*names: str) -> str | None:
        lacking = {"tc-bpf", "netem"} & set(names) - here
        return f"missing {lacking}" if lacking else None

    monkeypatch.setattr(capabilities, "missing", missing)
    assert switch.resolve(Impairer.AUTO) == expected
    for asked in (Impairer.BPF, Impairer.NETEM):
        assert switch.resolve(asked) is asked


def test_scenarios_say_why_they_cannot_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run(name: str) -> tuple[str, str, str, str]:
        case = runner.run_case(
            SCENARIOS[name],
            short=False,
            strict=False,
            seed=1,
            folder=tmp_path,
            say=lambda what: None,
            impairer=Impairer.NETEM,
        )
        return case.status, case.impairer, case.reason, case.command

    def lacks_netem(*names: str) -> str | None:
        return "missing capability netem" if "netem" in names else None

    monkeypatch.setattr(capabilities, "missing", lacks_netem)
    assert run("same-bits") == (
        Status.UNSUPPORTED,
        "netem",
        "missing capability netem",
        "sennit testbed run same-bits --seed 1 --impairment netem",
    )
    monkeypatch.setattr(capabilities, "missing", lambda *names: None)
    status, _, reason, _ = run("disorder")
    assert status == Status.UNSUPPORTED
    assert reason == "netem does not count what impairment.corrupted, corrupt_counted is made of"


@pytest.fixture
def bridged(monkeypatch: pytest.MonkeyPatch) -> Iterator[Planes]:
    """Planes whose bridges forward. Without netem they must not be impaired."""
    monkeypatch.setitem(switch.NEEDS, Impairer.NETEM, ("root", "netns", "nsenter", "bridge"))
    with Planes(hosts=3, planes=2, per_packet=True, impairer=Impairer.NETEM) as planes:
        yield planes


@pytest.mark.root
@pytest.mark.needs("netns", "nsenter", "bridge")
def test_bridges_forward_and_swallow(bridged: Planes) -> None:
    for source, target, plane in ((0, 1, 0), (2, 0, 1), (1, 2, 0)):
        account = send_datagrams(bridged, 200, plane=plane, source=source, target=target, arrivals=200)
        assert account.order == list(range(200))
    bridged.switch(1, up=False)
    assert send_datagrams(bridged, 50, plane=1, arrivals=0).order == []
    assert send_datagrams(bridged, 50, plane=0, arrivals=50).missing == set()
    bridged.switch(1, up=True)
    assert send_datagrams(bridged, 50, plane=1, arrivals=50).missing == set()
    with pytest.raises(RuntimeError, match="no counters of the switch: they are impaired by netem"):
        bridged.counters(0, 0)


@pytest.fixture
def netem() -> Iterator[Planes]:
    with Planes(hosts=2, planes=2, per_packet=True, impairer=Impairer.NETEM) as planes:
        yield planes


NETEM = [pytest.mark.root, pytest.mark.needs(*switch.NEEDS[Impairer.NETEM])]


class TestNetem:
    """Arrivals, if the kernel has netem."""

    pytestmark = NETEM

    def test_losses_are_those_it_counts(self, netem: Planes) -> None:
        netem.impair(Impairment(loss_fraction=0.1), planes=[1])
        account = send_datagrams(netem, COUNT, plane=1)
        counters = netem.netem_counters(0, 1)
        assert (counters.dropped, counters.packets) == (len(account.missing), COUNT - len(account.missing))
        # Ten standard deviations of a binomial distribution.
        assert abs(counters.dropped - 0.1 * COUNT) < 10 * (0.1 * 0.9 * COUNT) ** 0.5
        assert send_datagrams(netem, 200, plane=0).missing == set()

    def test_duplicates_and_order(self, netem: Planes) -> None:
        netem.impair(Impairment(duplicate_fraction=0.1))
        repeated = len(send_datagrams(netem, COUNT).repeated)
        assert abs(repeated - 0.1 * COUNT) < 10 * (0.1 * 0.9 * COUNT) ** 0.5
        netem.impair(Impairment(reorder_fraction=0.1, reorder_depth=1))
        account = send_datagrams(netem, COUNT)
        assert account.missing == set()
        assert account.late
        netem.impair(Impairment())
        assert send_datagrams(netem, COUNT).order == list(range(COUNT))

    def test_marks_instead_of_losses(self, netem: Planes) -> None:
        netem.impair(Impairment(ecn_fraction=0.1))
        account = send_datagrams(netem, COUNT)
        assert account.missing == set()
        assert abs(len(account.marked) - 0.1 * COUNT) < 10 * (0.1 * 0.9 * COUNT) ** 0.5

    def test_delays_and_rates_need_no_process(self, netem: Planes) -> None:
        netem.delay(20_000, hosts=[0])
        netem.limit_rate(10**9, queue_bytes=1 << 20, hosts=[1], direction=Direction.SEND)
        assert send_datagrams(netem, 200).missing == set()
        assert send_datagrams(netem, 200, source=1, target=0).missing == set()
        assert netem.delay_counters().received == 0
        shown = json.loads(
            subprocess.run(
                ["tc", "-n", netem.netns_name(0), "-j", "qdisc", "show", "dev", "plane0"],
                capture_output=True, text=True, timeout=20, check=True,
            ).stdout
        )  # fmt: skip
        assert shown[0]["options"]["delay"]["delay"] == pytest.approx(0.02)

    @pytest.mark.timeout(300)
    def test_a_scenario_runs_on_it(self, tmp_path: Path, seed: int) -> None:
        case = runner.run_case(
            SCENARIOS["same-bits"].shortened(),
            short=True,
            strict=False,
            seed=seed,
            folder=tmp_path,
            say=lambda what: None,
            impairer=Impairer.NETEM,
        )
        assert (case.status, case.impairer) == (Status.PASSED, "netem"), f"{case.reason}\n{case.log_tails}"
        assert case.measures["impairment.dropped"] > 0


def test_settings_of_ports_add_up() -> None:
    told: list[tuple[str, list[str]]] = []

    def run_batch(program: str, netns: str, lines: list[str]) -> None:
        assert program == "tc"
        told.append((netns, lines))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sennit.testbed.topology.netem.run_batch", run_batch)
        patch.setattr(capabilities, "missing", lambda *names: "no seeds")
        made = NetemSwitch(hosts=2, planes=2, name="switch", mtu=MTU_BYTES, netns_of=lambda host: f"host{host}")
        made.impair(Impairment(loss_fraction=0.5), [(0, 0), (0, 1), (1, 0)])
        made.delay(30, [(0, 1)])
        made.impair(Impairment(), [(0, 1)])
    lossy = "qdisc replace dev plane{} root handle 1: netem limit 100000 loss random 50%"
    assert told == [
        ("host0", [lossy.format(0), lossy.format(1)]),
        ("host1", [lossy.format(0)]),
        ("host0", ["qdisc replace dev plane1 root handle 1: netem limit 100000 delay 30us loss random 50%"]),
        ("host0", ["qdisc replace dev plane1 root handle 1: netem limit 100000 delay 30us"]),
    ]
