# SPDX-License-Identifier: Apache-2.0
"""What commands show on a terminal, and there alone: colours, and how far they are."""

from __future__ import annotations

import errno
import io
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import pytest
from rich.console import Console

from sennit.command_line import EXIT_NO_OUTPUT, OutputLost, fail, output, write_whole
from sennit.errors import SennitError
from tests.extent import briefly
from tests.free_ports import free_ports
from tests.terminal import run_on_terminal

ROOT = Path(__file__).resolve().parents[1]
QUIETLY = str(ROOT / "tools" / "quietly.sh")
COMMAND_TIMEOUT_S = 100.0
SENNIT = (sys.executable, "-m", "sennit")
# ECMA-48, Select Graphic Rendition: 30..38, 40..48, 90..97 and 100..107 are colours. The others, such as bold, are not.
COLOUR = re.compile(r"\x1b\[(?:\d+;)*(?:3[0-8]|4[0-8]|9[0-7]|10[0-7])[;\dm]")


def test_colours_are_for_terminals_and_no_color_turns_them_off() -> None:
    _, coloured = run_on_terminal(["doctor"], forked=True, timeout_s=COMMAND_TIMEOUT_S, NO_COLOR=None)
    assert COLOUR.search(coloured), coloured
    _, plain = run_on_terminal(["doctor"], forked=True, timeout_s=COMMAND_TIMEOUT_S, NO_COLOR="1")
    assert "RoCEv2 over UDP" in plain
    assert not COLOUR.search(plain), plain


EXPLAIN, HELP = ["explain", "allreduce", "64KiB"], ["explain", "--help"]


@pytest.mark.parametrize("encoding", briefly(["ascii", "latin-1"], ["latin-1"]))
def test_letters_that_a_terminal_lacks_become_plain_ones(encoding: str) -> None:
    """And a pipe gets no colours."""
    variables = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    variables["PYTHONIOENCODING"] = encoding
    for arguments, seen in ((EXPLAIN, "estimate µs"), (["doctor"], "RoCEv2 over UDP"), (["top", "--once"], "")):
        done = subprocess.run(
            [*SENNIT, *arguments], env=variables, capture_output=True, timeout=COMMAND_TIMEOUT_S, check=False
        )
        assert not done.stderr, done.stderr
        assert b"\x1b" not in done.stdout
        assert (seen.replace("µ", "u") if encoding == "ascii" else seen) in done.stdout.decode(encoding)


def test_every_letter_of_ours_has_a_plain_one() -> None:
    """And bars keep their order."""
    with output():
        assert "µ×·…→ ▁▄█ 漢".encode("ascii", "sennit") == b"ux....-> 148 ?"
        assert "µ→".encode("latin-1", "sennit") == b"\xb5->"


@pytest.mark.parametrize(
    ("flags", "arguments"),
    briefly(
        product(([], ["-u"]), (EXPLAIN, HELP, ["doctor", "--json"], ["version"])),
        [([], EXPLAIN), (["-u"], HELP), ([], ["version"])],
    ),
    ids=" ".join,
)
def test_output_that_cannot_be_written_is_told_in_one_line(flags: list[str], arguments: list[str]) -> None:
    def run(error: int) -> subprocess.CompletedProcess[str]:
        with open("/dev/full", "w") as full:
            return subprocess.run(
                [sys.executable, *flags, "-m", "sennit", *arguments],
                stdout=full, stderr=error or full, text=True, timeout=COMMAND_TIMEOUT_S, check=False,
            )  # fmt: skip

    done = run(subprocess.PIPE)
    assert (done.returncode, done.stderr) == (
        EXIT_NO_OUTPUT, "error: the output cannot be written: No space left on device\n"
    )  # fmt: skip
    if arguments == EXPLAIN:
        assert run(0).returncode == EXIT_NO_OUTPUT


def test_what_must_not_be_replaced_is_written_where_it_is(tmp_path: Path) -> None:
    """A link such as /dev/stdout stays one, and whoever reads a pipe gets what is written."""
    target, link, pipe = (tmp_path / name for name in ("target", "link", "pipe"))
    link.symlink_to(target)
    write_whole(link, "first")
    assert (link.is_symlink(), target.read_text()) == (True, "first")
    os.mkfifo(pipe)
    end = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_whole(pipe, "second")
        assert os.read(end, 100) == b"second"
    finally:
        os.close(end)
    assert pipe.is_fifo()
    with pytest.raises(SennitError, match="/dev/full cannot be written: No space left on device"):
        write_whole(Path("/dev/full"), "third")


def test_a_command_that_tells_its_errors_tells_of_lost_output_alike(capsys: pytest.CaptureFixture[str]) -> None:
    """As `sennit train` does, which gives every SennitError to `fail`."""
    with pytest.raises(SystemExit) as ended, output():
        fail(OutputLost(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    assert ended.value.code == EXIT_NO_OUTPUT
    assert capsys.readouterr().err == "error: the output cannot be written: No space left on device\n"


@pytest.mark.parametrize("module", briefly(["sennit", "sennit.runtime.training"], ["sennit"]))
def test_a_closed_pipe_ends_a_command_without_a_word(module: str) -> None:
    arguments = ["--help"] if module != "sennit" else EXPLAIN
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [sys.executable, "-m", module, *arguments],
            stdout=write, stderr=subprocess.PIPE, text=True, timeout=COMMAND_TIMEOUT_S, check=False,
        )  # fmt: skip
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_pipe_that_is_closed_before_the_last_words_ends_a_command_as_quietly() -> None:
    code = "from sennit.command_line import output\nwith output(): print('kept back until the end')"
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, text=True, check=False
        )
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.slow
@pytest.mark.timeout(4 * COMMAND_TIMEOUT_S)
@pytest.mark.needs("backend")
def test_train_feed_and_top_show_how_far_they_are() -> None:
    """The trainer waits for the feeder, and that for `top`: so `top` sees a rank that runs."""
    (port,) = free_ports(1)
    train = ["train", f"--ingest=cpu://127.0.0.1:{port}", "--batch-size=64", "--steps=30", "--epochs=9", "--dim=4"]
    feed = ["feed", "--data=synthetic", "--samples=1024", "--row-limit=100", f"--to=127.0.0.1:{port}"]

    def run(arguments: list[str], until: str = "", no_color: str | None = None) -> tuple[int, str]:
        return run_on_terminal(arguments, timeout_s=3 * COMMAND_TIMEOUT_S, until=until, forked=True, NO_COLOR=no_color)

    with ThreadPoolExecutor() as pool:
        trained = pool.submit(run, train)
        watched, seen = run(["top", "--interval=0.1"], until="op/s", no_color="1")
        fed, feeding = run(feed, no_color="1")
    assert (watched, fed) == (0, 0), seen + feeding
    assert "op/s" in seen
    assert "feeding" in feeding
    assert not COLOUR.search(seen + feeding), seen + feeding
    status, training = trained.result()
    assert status == 0, training
    assert re.search(r"30/30\b.* samples/s", training), training
    assert COLOUR.search(training)


def test_a_bar_says_what_the_steps_wait_for() -> None:
    torch = pytest.importorskip("torch")
    from sennit.runtime.training.display import ConsoleDisplay
    from sennit.runtime.training.trainer import StepReport

    file = io.StringIO()
    display = ConsoleDisplay(Console(file=file, force_terminal=True, width=120), batch_size=64)
    display.on_step(StepReport(step=1, step_count=300, epoch=0, samples=64, loss_sum=torch.tensor(1.0)))
    with display.on_wait("saving a checkpoint"):
        during = len(file.getvalue())
    display.close()
    assert "saving a checkpoint 0 s" in file.getvalue()[:during]
    assert "saving a checkpoint" not in file.getvalue()[during:]


def test_what_builds_shows_its_log_on_a_terminal_alone(tmp_path: Path) -> None:
    log, go = tmp_path / "log", tmp_path / "go"
    # The word is not in the command, which is shown where the log is still empty.
    command = [QUIETLY, str(log), "bash", "-c", f"echo fir''st; until [ -e {go} ]; do sleep 0.05; done; exit 3"]
    status, shown = run_on_terminal(command, timeout_s=COMMAND_TIMEOUT_S, until="first", then=lambda _: go.touch())
    assert status == 3
    assert re.search(r"[|/\\-] 0:0\d first", shown), shown
    assert f"failed; the whole output is in {log}" in shown
    piped = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    assert (piped.returncode, piped.stdout) == (3, "")
    assert piped.stderr.startswith("first\nerror: 'bash -c ")
    assert log.read_text() == "first\n"


# Commands of the build that may take longer than two seconds.
LONG = re.compile(
    r"cmake --build|cmake --install|apt-get (install|update)|pip\S* (--\S+ (\S+ )?)*(install|download)|-m (build|venv|"
    r"auditwheel|mkdocs)|\bfuzz_\$name|^\s*install_packages "
)

# Comments, what is told to people, and a folder of links that is made at once.
SAID = re.compile(r"^\s*#|\b(fail|say|echo) [\"$]|--without-pip")


@pytest.mark.parametrize("path", [ROOT / "Makefile", *sorted((ROOT / "tools").glob("*.sh"))], ids=str)
def test_every_long_step_of_the_build_shows_that_it_runs(path: Path) -> None:
    text = re.sub(r"\\\n", " ", path.read_text())
    lines = [line for line in text.splitlines() if LONG.search(line) and not SAID.search(line)]
    assert not [line for line in lines if not re.search(r"quietly |waiting |\$\(QUIETLY\) |install_packages ", line)]


def test_the_build_says_before_each_long_step_what_it_does_and_how_long_that_takes() -> None:
    """Also where nobody looks: in a file or a pipe."""
    lines = re.sub(r"\\\n", " ", (ROOT / "tools" / "build.sh").read_text()).splitlines()
    said = [number for number, line in enumerate(lines) if re.search(r'\bstep ".*(minute|seconds|less)', line)]
    long = [number for number, line in enumerate(lines) if LONG.search(line) and not SAID.search(line)]
    assert len(long) >= 8
    assert not [lines[number] for number in long if not any(number - 10 < before < number for before in said)]
