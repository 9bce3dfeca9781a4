# SPDX-License-Identifier: Apache-2.0
"""What all tests share: the seed, the markers of the outer rings, and the rule that traffic stays on loopback."""

import faulthandler
import fcntl
import functools
import gc
import multiprocessing.forkserver
import os
import random
import signal
import zlib
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import typer.main
from _pytest.faulthandler import fault_handler_stderr_fd_key

from sennit.doctor import capabilities
from sennit.testbed import rings  # its import adds the capabilities of the outer rings
from tests import extent

# What is imported and collected stays. To look for garbage in it again and again takes an eighth of the collection.
gc.disable()
# Every process that a test starts inherits it.
os.environ.setdefault("SENNIT_INTERFACES", "lo")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# As `sennit train` does for the process that it forks: pyarrow would start a thread there.
os.environ.setdefault("JE_ARROW_MALLOC_CONF", "background_thread:false")
# Triton reads this on import: without a GPU its kernels run in its interpreter.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# A shell starts background programs with interrupts ignored, and their children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Ranks are forked from one process that has imported what they need, where it is installed. It takes some seconds.
FORKED_HAVE = [
    *("pytest", "sennit.transport.communicator", "torch._dynamo", "sennit.runtime.training.run"),
    *("pyarrow.compute", "pyarrow.parquet", "pandas"),  # as the ranks of `sennit train`
    *("pydantic.fields", "pydantic.types"),  # typer has them where they are installed
    "hypothesis.strategies",  # extent.py
    "sennit.testbed.fork_server",  # the last: it is about what the others have brought
]
multiprocessing.get_context("forkserver").set_forkserver_preload(FORKED_HAVE)
# Tests call the product in this process. It would start the server with a list of its own, if it came first.
multiprocessing.forkserver.set_forkserver_preload = lambda modules_names: None

# Tests invoke commands of one program. typer would build all its commands for each of them.
typer.main.get_command = functools.cache(typer.main.get_command)

# Seconds and path of each test file that took long, the longest first (--write-long-files).
LONG_FILES = Path(__file__).with_name("long_files.txt")
LONG_S = 3.0

# Marker -> the capabilities that its ring needs.
RINGS = {"root": ("root", "netns"), "rdma": ("rdma",), "gpu": ("gpu",)}
DEFAULT_SEED = "1"

# A test that does not end at its timeout hangs in native code.
ENDS_AFTER_S = 60

# Limit of a test marked `long` that names none: what takes minutes on a quiet machine takes many on a busy one.
LONG_TIMEOUT_S = 600

# Of a test that does not say how many examples it draws.
EXAMPLES = 25


def namespaces() -> list[str]:
    return [os.readlink(f"/proc/self/ns/{kind}") for kind in ("mnt", "net")]


STARTED_IN = namespaces()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--seed", default=DEFAULT_SEED, help="seed of all random choices: a number, or 'random' for a new one"
    )
    parser.addoption("--long", action="store_true", help="also the tests marked `long`, which take minutes")
    parser.addoption(
        "--write-long-files", action="store_true", help=f"write the files that took long into {LONG_FILES.name}"
    )


def pytest_configure(config: pytest.Config) -> None:
    wanted = config.getoption("--seed")
    seed = random.SystemRandom().getrandbits(32) if wanted == "random" else int(wanted)
    config.stash[SESSION_SEED] = seed
    extent.is_long = config.getoption("--long")
    hypothesis.settings.register_profile(
        "sennit",
        deadline=None,  # a slow machine is not a failure
        database=None,
        max_examples=extent.number(EXAMPLES),
    )
    hypothesis.settings.load_profile("sennit")
    # Other processes of this session take over its options, and so the same seed. Hypothesis draws from it, too.
    config.option.seed = str(seed)
    if config.getoption("--hypothesis-seed") is None:
        hypothesis.core.global_force_seed = seed  # type: ignore[assignment]


SESSION_SEED = pytest.StashKey[int]()


def pytest_report_header(config: pytest.Config) -> str:
    return f"seed: {config.stash[SESSION_SEED]} (repeat with --seed={config.stash[SESSION_SEED]})"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what takes minutes, unless `--long` asks for it, and gives it time then.

    Where processes take whole files in turn, the longest come first: else all wait at the end for one of them.
    """
    if not config.getoption("--long"):
        left_out = [item for item in items if item.get_closest_marker("long") is not None]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item.get_closest_marker("long") is None]
    for item in items:
        # Not when it runs: what its own marker skips would belong to no ring.
        marks = {*_needed(item), *(mark.name for mark in item.iter_markers())}
        item.user_properties.append((rings.PROPERTY, rings.of_test(marks)))
        if item.get_closest_marker("long") is not None and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(LONG_TIMEOUT_S))
    if hasattr(config, "workerinput"):
        lines = LONG_FILES.read_text().splitlines()
        seconds = {path: float(text) for text, path in (line.split() for line in lines)}
        items.sort(key=lambda item: -seconds.get(item.path.relative_to(config.rootpath).as_posix(), 0.0))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Of two processes that collect at once, lets one rewrite the assertions of a file, and the other read them."""
    if not (isinstance(collector, pytest.Module) and hasattr(collector.config, "workerinput")):
        return (yield)
    with collector.path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        return (yield)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if not config.getoption("--write-long-files"):
        return
    seconds: defaultdict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            seconds[getattr(report, "nodeid", "").partition("::")[0]] += getattr(report, "duration", 0.0)
    lines = [
        f"{took:4.0f} {path}\n" for path, took in sorted(seconds.items(), key=lambda file: -file[1]) if took >= LONG_S
    ]
    LONG_FILES.write_text("".join(lines))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips a test if this machine lacks a capability of its ring, or of `needs(...)`. Names what is missing."""
    reason = capabilities.missing(*_needed(item))
    if reason is not None:
        pytest.skip(reason)
    _let_it_take_its_timeout(item)


def _needed(item: pytest.Item) -> list[str]:
    """The capabilities that a test needs."""
    names = [name for ring, needed in RINGS.items() if item.get_closest_marker(ring) for name in needed]
    return names + [name for marker in item.iter_markers("needs") for name in marker.args]


def _let_it_take_its_timeout(item: pytest.Item) -> None:
    """Moves the end of the session (pyproject.toml, faulthandler_timeout) behind the time that a test asks for."""
    marker = item.get_closest_marker("timeout")
    if marker is not None and marker.args[0] >= float(item.config.getini("faulthandler_timeout")):
        stderr = item.config.stash[fault_handler_stderr_fd_key]
        faulthandler.dump_traceback_later(marker.args[0] + ENDS_AFTER_S, file=stderr, exit=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None]:
    """Fails the test that left this process's namespaces.

    What is mounted from then on is not seen by the fork server, which stays where it was. So a later test would fail,
    and which one depends on the order.
    """
    yield
    assert namespaces() == STARTED_IN, f"{item.nodeid} left the namespaces of this process: start a process for it"


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """Returns a seed of this test alone. It is printed, so a failure's report has it."""
    value = (request.config.stash[SESSION_SEED] << 32) ^ zlib.crc32(request.node.nodeid.encode())
    print(f"seed of this test: {value}")
    return value


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)
