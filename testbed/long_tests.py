# SPDX-License-Identifier: Apache-2.0
"""`make test-long`: what takes too long for `make test`. It is run before a piece of work is called done.

Each part is a command. What it did goes into docs/lab/long-tests.json at once, one entry a part: when, at which commit,
on which processor, with which seed, how long, and how it ended. docs/lab/long-tests.md is made from that file. `make
test-long PARTS="model,tables"` runs these parts alone, and keeps the entries of the others. A part that fails stops
no other; the exit code is 1 then. The whole output of a part is in build/long.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import json
import os
import re
import resource
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from sennit.runtime.calibrate import machine
from sennit.testbed.bench.figures.figures import place
from sennit.testbed.marked_page import with_part

ROOT: Final = Path(__file__).resolve().parents[1]
LOGS: Final = ROOT / "build" / "long"
RECORD: Final = ROOT / "docs" / "lab" / "long-tests.json"
PAGE: Final = ROOT / "docs" / "lab" / "long-tests.md"
RANDOM_CALLS: Final = "tests/runtime/test_differential.py"
PYTEST: Final = ("-m", "pytest", "--long", "-v", "-p", "no:cacheprovider", "--durations", "20")
PR_SET_CHILD_SUBREAPER: Final = 36  # linux/prctl.h
IN_TWO: Final = ("--numprocesses", "2", "--dist", "loadfile", "--no-loadscope-reorder")
BEGIN, END = "<!-- long tests: begin -->", "<!-- long tests: end -->"
REPLAYED: Final = "replayed batches"
# The page that says what the part REPLAYED found.
PLANS: Final = ROOT / "docs" / "reference" / "feature-plans.md"
PLANS_BEGIN, PLANS_END = f"<!-- {REPLAYED}: begin -->", f"<!-- {REPLAYED}: end -->"
MODEL: Final = "build/model/transport/csrc/tests/model"
NETWORKS: Final = "build/model/transport/csrc/tests/networks"


# The last line of pytest, of the model, of the fuzzers, of ctest and of scenarios, whichever a part prints.
_ENDS: Final = re.compile(r"^.*(?:\d+ passed|\d+ failed|tests passed|schedules|fuzz: |cases).*$", re.MULTILINE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """One command of the long tests."""

    what: str
    """What the part checks, for the page."""

    command: tuple[str, ...]
    """With `{seed}` where the seed goes. A command that begins with `-` is given to this Python."""

    files: tuple[str, ...] = ()
    """Patterns of test files below `tests`, which end the command. What an earlier part has is left out."""

    limit_s: int
    """After it the part has failed."""

    says: re.Pattern[str] = _ENDS
    """What goes into the record: the last line of its output that this finds."""


_LONG: Final = (*PYTEST, *IN_TWO, "-m", "long", "--seed", "{seed}")
PARTS: Final = {
    "collectives": Part(
        what="tests marked `long` of collectives: every case of worlds, transports, memories, codecs, deaths and "
        "disagreements",
        command=_LONG,
        files=(
            "transport/**/test_*.py",
            "runtime/test_backend_*.py",
            "runtime/test_aggregate_*.py",
            "runtime/test_symmetric.py",
        ),
        limit_s=5_400,
    ),
    "kernels": Part(
        what="tests marked `long` of embedding kernels: every case on a CPU, in Triton's interpreter, and of tables "
        "on a device",
        command=_LONG,
        files=(
            "runtime/test_embedding_*.py",
            "runtime/test_tensor_train*.py",
            "runtime/test_*_device.py",
            "runtime/test_memory_*.py",
        ),
        limit_s=5_400,
    ),
    "tables": Part(
        what="tests marked `long` of tables in shards: every case of worlds, placements, files and dynamic ids, and "
        "500 schedules of overlapped steps",
        command=_LONG,
        files=(
            "runtime/test_sharded*.py",
            "runtime/test_dynamic_tables.py",
            "runtime/test_replica*.py",
            "runtime/test_pipeline*.py",
        ),
        limit_s=5_400,
    ),
    REPLAYED: Part(
        what="ten million batches at XDP, which two processors fill with packets, replays and malformed ones, while "
        "one of them reads",
        command=(*PYTEST, "--seed", "{seed}"),
        files=("offload/test_xdp_races.py",),
        limit_s=5_400,
        says=re.compile(r"^.* batches, .* wrong; .*$", re.MULTILINE),
    ),
    "streams": Part(
        what="tests marked `long` of streams and feeders: deaths, newcomers, every format, and a stream of ten times "
        "the memory that a run may use",
        command=_LONG,
        files=(
            "runtime/stream/**/test_*.py",
            "runtime/test_fe*.py",
            "runtime/test_ingest_*.py",
            "offload/**/test_*.py",
            "ebpf/**/test_*.py",
        ),
        limit_s=5_400,
    ),
    "training": Part(
        what="tests marked `long` of the trainer: the tutorials, kills at every point of a save, deaths, newcomers and "
        "resumed runs",
        command=_LONG,
        files=("runtime/test_*.py",),
        limit_s=5_400,
    ),
    "empty roots": Part(
        what="the workflow for the VM, in roots of Debian and Ubuntu that have nothing but the base system",
        command=(*PYTEST, "-m", "long", "--seed", "{seed}"),
        files=("testbed/test_empty_roots.py",),
        limit_s=7_200,
    ),
    "hostile counters": Part(
        what="a million mutated pages of counters to all of their readers, and a hundred thousand mutated requests to "
        "`sennit metrics`",
        command=_LONG,
        files=("testbed/test_hostile_*.py",),
        limit_s=5_400,
    ),
    "commands": Part(
        what="tests marked `long` of commands and the testbed: short forms of all scenarios, and a bundle for a GPU "
        "machine",
        command=_LONG,
        files=("testbed/**/test_*.py", "test_*.py"),
        limit_s=5_400,
    ),
    "examples": Part(
        what="tests of random examples, with ten times as many examples",
        command=(*PYTEST, *IN_TWO, "-m", "hypothesis and not long", "--seed", "{seed}"),
        limit_s=7_200,
    ),
    "random calls": Part(
        what="a hundred thousand random calls beside gloo",
        command=(*PYTEST, "-m", "long", "--seed", "{seed}", RANDOM_CALLS, "-k", "gloo"),
        limit_s=3_600,
    ),
    "callbacks": Part(
        what="a million calls of random programs whose callbacks wait, post, lock, sleep and throw, over two to four "
        "groups of two to five ranks, some aborted, shm and udp",
        command=(*PYTEST, "-m", "long", "--seed", "{seed}", RANDOM_CALLS, "-k", "callbacks"),
        limit_s=7_200,
    ),
    "C++": Part(
        what="C++ tests of the suite `long`, under sanitizers",
        command=(
            "ctest",
            "--test-dir",
            "build/asan",
            "-C",
            "long",
            "-L",
            "long",
            "--output-on-failure",
            "--no-tests=error",
        ),
        limit_s=1_200,
    ),
    "model": Part(
        what="five million schedules of faults against the flow",
        command=(f"{MODEL}/fault_model", "--first", "{seed}000000", "--schedules", "5000000"),
        limit_s=3_600,
    ),
    "small model": Part(
        what="a million schedules with numbers that wrap",
        command=(f"{MODEL}/fault_model_small", "--first", "{seed}000000", "--schedules", "1000000"),
        limit_s=3_600,
    ),
    "exchanges": Part(
        what="a million schedules of messages among two to five ranks over shared memory and networks",
        command=(f"{MODEL}/exchange_model", "--first", "{seed}000000", "--schedules", "1000000"),
        limit_s=7_200,
    ),
    "ablation": Part(
        what="twenty thousand random networks with all of loss recovery, and without each of its mechanisms",
        command=(f"{NETWORKS}/recovery_ablation", "--networks", "20000", "--first", "{seed}00000"),
        limit_s=3_600,
    ),
    "fuzzers": Part(
        what="libFuzzer, two minutes each",
        command=("make", "--no-print-directory", "fuzz", "SECONDS=120"),
        limit_s=1_800,
    ),
    "frameworks": Part(
        what="tests of Lightning, Accelerate and TorchRec over sennit",
        command=("make", "--no-print-directory", "frameworks"),
        limit_s=3_600,
    ),
    "same bits": Part(
        what="`same-bits-training`: 210 runs with other ranks, placements, losses, deaths and newcomers, one digest",
        command=("-m", "sennit", "testbed", "run", "same-bits-training", "--seed", "{seed}"),
        limit_s=7_200,
    ),
    "dynamic tables": Part(
        what="`same-bits-dynamic`: 60 runs of dynamic tables, in which every three of ranks, placement, network with "
        "loss, home of rows, a death with a newcomer, and a resumption meet, one digest",
        command=("-m", "sennit", "testbed", "run", "same-bits-dynamic", "--seed", "{seed}"),
        limit_s=7_200,
    ),
    "wheels": Part(
        what="the README's commands from the wheels, without a compiler, root, an index or a network",
        command=("make", "--no-print-directory", "try-wheels"),
        limit_s=3_600,
    ),
    "training over RDMA": Part(
        what="a model is trained over RDMA devices that lose packets, in the VM: the bits of shared memory",
        command=("make", "--no-print-directory", "test-rdma", "RING_OPTIONS=--long -k weights_do_not_depend"),
        limit_s=1_800,
    ),
    "two processors": Part(
        what="the tests over RDMA in QEMU, where the guest has two processors",
        command=("make", "--no-print-directory", "test-qemu"),
        limit_s=3_600,
    ),
    "Arm cores": Part(
        what="the C++ tests for Arm cores, in QEMU's user mode (g++-aarch64-linux-gnu, qemu-user)",
        command=("make", "--no-print-directory", "cross"),
        limit_s=7_200,
    ),
}


def files_of(name: str) -> list[str]:
    """The test files of a part with patterns: each file belongs to the first part that names it."""
    taken = {RANDOM_CALLS}  # two parts name it themselves
    for one, part in PARTS.items():
        matching = (path for pattern in part.files for path in (ROOT / "tests").glob(pattern))
        found = {path.relative_to(ROOT).as_posix() for path in matching} - taken
        if one == name:
            return sorted(found)
        taken |= found
    raise KeyError(name)


def run(name: str, part: Part, seed: int) -> dict[str, Any]:
    """Runs a part, and returns its entry of the record."""
    command = [word.format(seed=seed) for word in part.command] + files_of(name)
    if command[0].startswith("-"):
        command.insert(0, sys.executable)
    LOGS.mkdir(parents=True, exist_ok=True)
    log = LOGS / f"{name.replace(' ', '-')}.log"
    about, commit = machine.describe(), _commit()
    began_s, used_s = time.monotonic(), _processor_s()
    with log.open("w") as output, _adopting():
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code: int | None = process.wait(part.limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:  # also of what the part has left behind
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-process.pid, 0):
                    pass
            process.wait()
    ends = part.says.findall(log.read_text(errors="replace", encoding="utf-8"))
    return {
        "date": str(about["time_utc"])[:10],
        "commit": commit,
        **{key: about[key] for key in ("processor", "cores", "load_average")},
        "seed": seed,
        "seconds": round(time.monotonic() - began_s),
        "processor_s": round(_processor_s() - used_s),
        "outcome": "passed" if code == 0 else "took too long" if code is None else f"failed ({code})",
        "said": textwrap.shorten(ends[-1].strip(" ="), 100, placeholder=" …") if ends else "",
    }


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Orphans among the descendants become children of this process, so that their processor time counts, too.

    The ranks of many tests come from a fork server, for which nobody waits.
    """
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    # Parts before this one have written these.
    but = (f":!{path.relative_to(ROOT)}" for path in (RECORD, PAGE, PLANS))
    changed = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", ".", *but], cwd=ROOT, check=False).returncode != 0
    return done.stdout.strip() + (" and changes" if changed else "")


def listed(record: dict[str, dict[str, Any]]) -> str:
    """The list of the page: a part, what it checks, and its last run."""
    lines = []
    for name, part in PARTS.items():
        text = f"- **{name}**: {part.what}."
        if (one := record.get(name)) is None:
            text += " Never run."
        else:
            took = f"{one['seconds'] / 60:.0f} min" if one["seconds"] >= 90 else f"{one['seconds']} s"
            if "processor_s" in one:
                took += f", {one['processor_s'] / 60:.0f} CPU-minutes"
            said = f" ({one['said']})" if one["said"] else ""
            text += f" *{one['date']}, commit {one['commit']}, {place(one)}, "
            text += f"seed {one['seed']}: {one['outcome']}{said}, {took}.*"
        lines.append(textwrap.fill(text, 118, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False))
    return "\n".join(lines)


def replayed(record: dict[str, dict[str, Any]]) -> str:
    """What the page of plans says of the part REPLAYED."""
    if (one := record.get(REPLAYED)) is None:
        return "Ten million batches of that have not been run yet."
    text = f"The last long run, {one['date']}, commit {one['commit']}, {place(one)}: {one['outcome']}; "
    return textwrap.fill(f"{text}{one['said'] or 'no batch'}.", 118, break_long_words=False, break_on_hyphens=False)


def write_pages(record: dict[str, dict[str, Any]]) -> None:
    """Writes what the pages say of a record."""
    for page, begin, end, part in (
        (PAGE, BEGIN, END, listed(record)),
        (PLANS, PLANS_BEGIN, PLANS_END, replayed(record)),
    ):
        text = with_part(page.read_text(encoding="utf-8"), begin, end, part, what="the long tests")
        page.write_text(text, encoding="utf-8")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="make test-long")
    parser.add_argument("--parts", default="", help=f"some of: {', '.join(PARTS)}; commas between them; default: all")
    parser.add_argument("--seed", type=int, default=int(time.time()) // 86_400, help="default: the day's number")
    asked = parser.parse_args(arguments)
    names = [name.strip() for name in asked.parts.split(",") if name.strip()] or list(PARTS)
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"no part {unknown[0]!r}; allowed: {', '.join(PARTS)}")
    # A part has a process group of its own, which would outlive this process: `run` ends it on the way out.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    failed = []
    for name in names:
        print(f"test-long: {name}: {PARTS[name].what}", flush=True)
        entry = run(name, PARTS[name], asked.seed)
        record = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
        record[name] = entry
        RECORD.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        write_pages(record)
        print(f"test-long: {name}: {entry['outcome']} in {entry['seconds']} s. {entry['said']}", flush=True)
        if entry["outcome"] != "passed":
            failed.append(name)
    if failed:
        print(f"test-long: failed: {', '.join(failed)}; their output is in {LOGS.relative_to(ROOT)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
