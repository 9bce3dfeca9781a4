# SPDX-License-Identifier: Apache-2.0
"""The agent's socket, with peers that say nonsense, say nothing, or are too many. No program is loaded here."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sennit.doctor import capabilities
from sennit.errors import ConfigError
from sennit.offload.agent import server
from sennit.offload.agent.errors import AgentError
from sennit.offload.agent.permissions import Grant, Permissions
from sennit.offload.agent.protocol import (
    VERSION,
    WORK_MAX,
    LeaseRequest,
    check_work,
    decode,
    decode_request,
    encode_request,
)
from sennit.offload.agent.receiver import LeasedReceiver, agent_socket, check, terms
from sennit.offload.agent.server import SPARE, Agent
from sennit.offload.batches import BatchLayout
from sennit.offload.errors import PlanError, TargetUnavailable
from sennit.offload.operators import Clamp, Cross, Log1p, Operator, Sample, SigridHash
from sennit.offload.plan import FeaturePlan, Sparse
from sennit.offload.plan_program import SOURCE_MAX_BYTES, PlanProgram
from sennit.offload.schema import Dense, Ids, Schema
from sennit.offload.sketch import SketchShape
from tests.extent import examples
from tests.offload.ingest_world import PLAN
from tests.offload.strategies import plans

GRANT = Grant(
    users=frozenset({os.getuid()}),
    groups=frozenset(),
    interfaces=frozenset({"lo", "nowhere0"}),
    ports=range(4800, 4900),
    leases=2,
    memory_mib=64,
)
DEADLINE_S = 20.0
REQUEST = LeaseRequest(
    interface="lo",
    port=4800,
    session=7,
    address=1 << 32,
    layout=BatchLayout(plan=PLAN, batch_rows=4, slots=2),
    sketch=SketchShape(),
)


class Served:
    """An agent in this process, and what it has said."""

    def __init__(self, path: Path) -> None:
        self.said: list[str] = []
        self.agent = Agent(Permissions((GRANT,)), path, self.said.append)
        self.thread = threading.Thread(target=self.agent.run, daemon=True)
        self.thread.start()

    def connect(self) -> socket.socket:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        made.settimeout(DEADLINE_S)
        made.connect(str(self.agent.path))
        return made

    def ask(self, line: bytes) -> dict[str, Any]:
        """What the agent answers before it closes the connection."""
        with self.connect() as connection:
            with contextlib.suppress(BrokenPipeError):
                connection.sendall(line)
            answer = b""
            while chunk := connection.recv(1 << 16):
                answer += chunk
        return decode(answer)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    made = Served(tmp_path / "agent.sock")
    with made.agent:
        yield made
    made.thread.join(DEADLINE_S)
    assert not made.thread.is_alive()
    assert not made.agent.path.exists()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    made = Served(tmp_path_factory.mktemp("agent") / "agent.sock")
    with made.agent:
        yield made


def test_a_user_hears_what_they_may_have(served: Served) -> None:
    path = served.agent.path
    (found,) = terms(path)
    assert found == {"interfaces": ["lo", "nowhere0"], "ports": [4800, 4899], "leases": 2, "memory_mib": 64}
    check(path, "lo", 4800)
    with pytest.raises(TargetUnavailable, match="interface lo, port 4900; allowed: lo, nowhere0 ports 4800 to 4899"):
        check(path, "lo", 4900)
    with pytest.raises(TargetUnavailable, match="there is no interface 'nowhere0'"):
        check(path, "nowhere0", 4800)


def test_doctor_says_what_a_user_may_have(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = capabilities.PROBES["xdp-agent"]
    monkeypatch.setenv("SENNIT_AGENT", str(served.agent.path))
    assert probe() == capabilities.present("xdp-agent", f"{served.agent.path}: lo, nowhere0 ports 4800 to 4899")
    monkeypatch.setenv("SENNIT_AGENT", "/nowhere")
    what, remedy = "no agent at /nowhere: No such file or directory", "start sennit agent, or set SENNIT_AGENT"
    assert probe() == capabilities.absent("xdp-agent", what, remedy)


def test_nobody_else_is_heard(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Permissions, "of", lambda *arguments: ())
    with pytest.raises(TargetUnavailable, match=f"user {os.getuid()} may have no program; the agent's file says who"):
        terms(served.agent.path)
    assert served.said == [f"refused: user {os.getuid()} may have no program; the agent's file says who may"]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b"\n", "a line that is no JSON"),
        (b"[]\n", "a line that is no JSON object"),
        (b"[" * 100_000 + b"\n", "a line that is no JSON"),
        (b"1" * 5000 + b"\n", "a line that is no JSON"),
        (b"{}\n{}\n", "a line that is no JSON"),
        (b"x" * ((1 << 20) + 1), "allowed: a line of at most 1048576 bytes, and one socket with it"),
        (encode_request(REQUEST), "no socket came along; allowed: one of UDP"),
    ],
)
def test_nonsense_is_refused_and_the_agent_goes_on(served: Served, line: bytes, told: str) -> None:
    assert served.ask(line)["error"].startswith(told)
    assert len(terms(served.agent.path)) == 1


def test_other_descriptors_than_a_socket_are_refused(served: Served) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with open("/dev/null", "rb") as null:
        for count, told in ((1, "what came along is no socket; allowed: one of UDP"), (3, "what came along")):
            with served.connect() as connection:
                socket.send_fds(connection, [encode_request(REQUEST)], [null.fileno()] * count)
                assert decode(connection.recv(1 << 16))["error"].startswith(told)
                assert connection.recv(1) == b"", "it is closed"
    assert len(os.listdir("/proc/self/fd")) <= before


@given(st.binary(max_size=300))
@examples(20)
def test_no_bytes_stop_the_agent(shared: Served, junk: bytes) -> None:
    with shared.connect() as connection, contextlib.suppress(OSError):
        connection.sendall(junk)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(1 << 16):
            pass
    assert shared.thread.is_alive()


def test_silent_peers_keep_their_own_places_only(served: Served) -> None:
    most = GRANT.leases + SPARE
    silent = [served.connect() for _ in range(most)]
    for connection in silent:
        connection.sendall(b"{")  # and no more
    with pytest.raises(TargetUnavailable, match=rf"{most} connections of user \d+; allowed: {most}"):
        terms(served.agent.path)
    silent.pop().close()
    # The agent has seen the end of that one when it lets another in.
    while True:
        with contextlib.suppress(TargetUnavailable):
            terms(served.agent.path)
            break
    for connection in silent:
        connection.close()


def test_a_request_that_does_not_end_is_ended(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "REQUEST_S", 0.05)
    assert served.ask(b'{"version":')["error"] == "no whole request within 0.05 s"


def test_an_agent_that_ends_says_so_to_those_it_hears(tmp_path: Path) -> None:
    made = Served(tmp_path / "agent.sock")
    with made.connect() as connection:
        terms(made.agent.path)  # comes behind it, so the agent has the first one
        made.agent.close()
        assert decode(connection.recv(1 << 16)) == {"error": "the agent ends"}
    made.thread.join(DEADLINE_S)
    with pytest.raises(TargetUnavailable, match=r"no agent at .*: No such file or directory; start sennit"):
        terms(made.agent.path)


def test_a_path_in_use_is_refused_and_one_that_is_left_is_taken(served: Served, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="another agent serves there"):
        Agent(Permissions((GRANT,)), served.agent.path)
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError, match="is there, and is no socket; allowed: a path for a new one"):
        Agent(Permissions((GRANT,)), file)
    left = tmp_path / "left.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(left))
    with Agent(Permissions((GRANT,)), left):
        assert left.is_socket()


@given(plans())
@examples(25)
def test_a_request_is_read_as_it_was_written(plan: FeaturePlan) -> None:
    layout = BatchLayout(plan=plan, batch_rows=4, slots=2)
    request = LeaseRequest(interface="lo", port=1, session=0, address=1 << 40, layout=layout, sketch=None)
    if layout.plan.keep:
        with pytest.raises(PlanError, match="a plan that leaves out rows"):
            encode_request(request)
        return
    read = decode_request(encode_request(request))
    assert isinstance(read, LeaseRequest)
    assert encode_request(read) == encode_request(request)
    assert read.layout.slot_bytes == layout.slot_bytes
    assert read.layout.plan.schema.schema_id == plan.schema.schema_id


VALID = json.loads(encode_request(REQUEST))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
    max_leaves=9,
)


@given(st.sampled_from([*VALID, "more", "plan.schema", "plan.columns", "plan.dense", "plan.sparse"]), JSON)
@example("port", True)
@example("address", (1 << 32) + 4096)
@example("address", 1 << 47)
@example("batch_rows", 1 << 40)
@example("slots", 3)
@example("sketch", [3, 1, 1])
@example("sketch", [1, 1])
@example("version", True)
@example("plan.sparse", [["sample", 0]])
@examples(150)
def test_every_field_is_checked(place: str, value: Any) -> None:
    content = json.loads(json.dumps(VALID))
    *above, name = place.split(".")
    table = content[above[0]] if above else content
    was = table.get(name)
    table[name] = value
    try:
        read = decode_request(json.dumps(content).encode())
    except AgentError:  # and nothing else
        return
    assert isinstance(read, LeaseRequest)
    if was != value or type(was) is not type(value):  # another value that is allowed: it is what was read
        assert json.loads(encode_request(read)) | {"version": VERSION} == content


def test_work_that_grows_with_each_use_is_bounded() -> None:
    """Each column crosses the one before with itself: 2^n operators, in a line of some kilobytes."""
    columns: dict[str, Operator] = {"x0": Cross(left="sample", right="sample")}
    columns |= {f"x{n}": Cross(left=f"x{n - 1}", right=f"x{n - 1}") for n in range(1, 40)}
    plan = FeaturePlan(schema=Schema(ids=(Ids(name="sample"),)), columns=columns, sparse=(Sparse(column="x39"),))
    with pytest.raises(AgentError, match=f"a plan of {2**40 - 1} operators, counted once .* allowed: {WORK_MAX}"):
        check_work(plan)
    columns = {f"l{n}": Log1p(column="age", bits=24 - n % 3) for n in range(3)}
    plan = FeaturePlan(schema=Schema(dense=(Dense(name="age"),)), columns=columns, dense=tuple(columns))
    with pytest.raises(AgentError, match=f"tables of {(4 << 24) + (4 << 23) + (4 << 22)} bytes; allowed: {64 << 20}"):
        check_work(plan)
    check_work(PLAN)


def test_a_program_that_takes_a_compiler_long_is_not_compiled() -> None:
    """Its operators are not too many. Each of them is written for each of four ids."""
    names = [f"i{n}" for n in range(100)]
    columns: dict[str, Operator] = {}
    for name in names:
        for depth in range(18):
            columns[f"{name}_{depth}"] = SigridHash(
                column=f"{name}_{depth - 1}" if depth else name, salt=depth, max_value=1 << 20
            )
    plan = FeaturePlan(
        schema=Schema(ids=tuple(Ids(name=name, length=4) for name in names)),
        columns=columns,
        sparse=tuple(Sparse(column=f"{name}_17") for name in names),
    )
    check_work(plan)
    layout = BatchLayout(plan=plan, batch_rows=4, slots=2)
    with pytest.raises(PlanError, match=f"a program of [0-9]+ bytes in C; allowed: {SOURCE_MAX_BYTES}"):
        PlanProgram(layout, session=1, udp_port=4800, sketches=None)


def test_a_plan_that_leaves_rows_out_is_refused_by_the_trainer(served: Served) -> None:
    plan = FeaturePlan(
        schema=Schema(dense=(Dense(name="age"),)),
        columns={"young": Clamp(column="age", low=0.0, high=1.0)},
        dense=("young",),
        keep=(Sample(fraction=0.5, seed=1),),
    )
    layout = BatchLayout(plan=plan, batch_rows=4, slots=2)
    with pytest.raises(PlanError, match="a plan that leaves out rows; allowed: one that keeps them all"):
        LeasedReceiver(layout, session=1, interface="lo", udp_port=4800, agent=served.agent.path)


def test_which_agent_a_process_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = tmp_path / "usual.sock"
    monkeypatch.setattr("sennit.offload.agent.receiver.SOCKET", usual)
    monkeypatch.delenv("SENNIT_AGENT", raising=False)
    monkeypatch.setattr("sennit.offload.agent.receiver.missing_privileges", lambda: ["CAP_BPF"])
    assert agent_socket() is None, "there is none"
    usual.touch()
    assert agent_socket() == usual
    monkeypatch.setattr("sennit.offload.agent.receiver.missing_privileges", lambda: [])
    assert agent_socket() is None, "a process with rights needs none"
    monkeypatch.setenv("SENNIT_AGENT", "/some/where")
    assert agent_socket() == Path("/some/where")
    monkeypatch.setenv("SENNIT_AGENT", "")
    assert agent_socket() is None
