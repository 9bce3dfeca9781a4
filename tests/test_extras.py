# SPDX-License-Identifier: Apache-2.0
"""The wheels in an empty environment, once for each extra: its commands work, and errors name what is missing."""

from __future__ import annotations

import ast
import http.server
import io
import os
import platform
import re
import signal
import subprocess
import sys
import threading
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from elftools.elf.elffile import ELFFile

import sennit
from sennit import extras
from tests.empty_environment import Environment, NotHere, build_extension_wheel, build_wheel, compiler
from tests.extent import briefly

FOLDERS = ("ebpf", "offload", "runtime", "sennit", "testbed", "transport")
ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
COMMAND_TIMEOUT_S = 240.0
# Stripped, and no part twice.
CORE_MAX_BYTES, EXTENSION_MAX_BYTES = 6_000_000, 3_000_000
# PEP 600's policy for manylinux has the system's. ISA-L is copied into the wheel, with its licence (LICENSES).
OF_THE_SYSTEM = {"libc.so.6", "libm.so.6", "ld-linux-x86-64.so.2", "libstdc++.so.6", "libgcc_s.so.1"}
OURS = {"libsennit_core.so", "libsennit_kernels.so"}
COPIED = {"libisal.so.2"}
TRAIN = ["-m", "sennit", "train"]

# Its first user builds the wheel in the folder of `make build`. That takes minutes if nothing is compiled there.
WHEEL_TIMEOUT_S = 900


def wheel_test(function: Callable[..., None]) -> Callable[..., None]:
    for mark in (pytest.mark.needs("backend"), pytest.mark.slow, pytest.mark.timeout(WHEEL_TIMEOUT_S)):
        function = mark(function)
    return function


# An AllReduce over shared memory between two processes, without torch.
ALL_REDUCE = """
import multiprocessing, sys
import numpy as np
from sennit.transport.communicator import Communicator
from sennit.transport.meeting.store import FileStore

def rank(number):
    with Communicator(rank=number, world=2, store=FileStore(sys.argv[1])) as group:
        array = np.full(1000, number + 1.0, np.float32)
        assert (group.allreduce(array) == 3.0).all()

if __name__ == "__main__":
    other = multiprocessing.get_context("fork").Process(target=rank, args=(1,))
    other.start()
    rank(0)
    other.join()
    sys.exit(other.exitcode)
"""


# One rank with counters to read, until its standard input ends.
COUNTING = """
import sys
from sennit.transport.communicator import Communicator
from sennit.transport.meeting.store import FileStore

with Communicator(rank=0, world=1, store=FileStore(sys.argv[1])):
    print("counting", flush=True)
    sys.stdin.read()
"""


def third_party_imports() -> Iterator[tuple[Path, str]]:
    """Yields top-level names of all imported modules, except for the standard library and the product's own."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                names: list[str] = []
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                    names = [node.module]
                for name in {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {"sennit"}:
                    yield path, name


def test_every_package_that_is_imported_belongs_to_sennit_or_to_an_extra() -> None:
    required = {re.split(r"[><=\[; ]", text)[0] for text in PROJECT["dependencies"]}
    # From the system's packages (bcc, pyverbs), installed with torch for GPUs (triton), or by hand without what it
    # requires, which would replace torch (torchrec). MkDocs calls its hooks itself.
    # Only a checkout has tests, and so needs pytest.
    elsewhere = {"bcc", "mkdocs", "pytest", "pyverbs", "torchrec", "triton"}
    for path, module in third_party_imports():
        distribution = extras.DISTRIBUTIONS.get(module, module)
        known = module in required or module in elsewhere or extras.install_command(distribution)
        assert known, f"{path} imports {module}, which no extra has: name its distribution in sennit/extras.py"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment without any extra, and without torch."""
    return Environment(tmp_path_factory.mktemp("bare"), wheel)


@pytest.fixture(scope="module")
def without_extension(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with torch, for which there is no extension, and with what builds one."""
    return Environment(tmp_path_factory.mktemp("no-extension"), wheel, beside=["torch", "setuptools"])


@pytest.fixture(scope="module")
def extension_wheel(without_extension: Environment, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_extension_wheel(tmp_path_factory.mktemp("extension-wheel"), without_extension)


@pytest.fixture(scope="module")
def with_torch(wheel: Path, extension_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment without any extra, but with torch and the extension for it."""
    return Environment(tmp_path_factory.mktemp("torch"), wheel, beside=["torch"], wheels=[extension_wheel])


@pytest.fixture
def made(request: pytest.FixtureRequest, wheel: Path, tmp_path: Path) -> Environment:
    """An environment with one extra, and with torch and the extension if the extra's commands need it."""
    extra, torch = request.param
    wheels = [request.getfixturevalue("extension_wheel")] if torch else []
    try:
        folder = tmp_path / "environment"
        return Environment(folder, wheel, extra, beside=["torch"] if torch else [], wheels=wheels)
    except NotHere as missing:
        pytest.skip(f"extra {extra}: {missing}")


def extra(name: str, *, torch: bool = False) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("made", [pytest.param((name, torch), id=name)], indirect=True)


def succeed(environment: Environment, *arguments: str) -> str:
    done = environment.run(*arguments, timeout_s=COMMAND_TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_extra_is_tried() -> None:
    source = Path(__file__).read_text()
    for name in PROJECT["optional-dependencies"].keys() - extras.NOT_OFFERED:
        assert f'@extra("{name}"' in source, name


def test_the_page_names_every_extra() -> None:
    page = (ROOT / "docs" / "how-to" / "install.md").read_text()
    for name in PROJECT["optional-dependencies"].keys() - extras.NOT_OFFERED:
        assert f"[{name}]`" in page, name


@wheel_test
def test_without_extras_and_torch_numpy_arrays_are_reduced(bare: Environment, tmp_path: Path) -> None:
    program = tmp_path / "all_reduce.py"
    program.write_text(ALL_REDUCE)
    assert "torch is not installed" in succeed(bare, "-m", "sennit", "version")
    succeed(bare, str(program), str(tmp_path / "store"))


# Both ranks of an AllReduce over torch.distributed in one process each.
TORCH_ALL_REDUCE = """
import multiprocessing, sys
import torch, torch.distributed as dist

def rank(number):
    dist.init_process_group("sennit", store=dist.FileStore(sys.argv[1], 2), rank=number, world_size=2)
    tensor = torch.full((1000,), number + 1.0)
    dist.all_reduce(tensor)
    assert tensor.eq(3.0).all()
    dist.destroy_process_group()

if __name__ == "__main__":
    other = multiprocessing.get_context("fork").Process(target=rank, args=(1,))
    other.start()
    rank(0)
    other.join()
    sys.exit(other.exitcode)
"""


BUILD_EXTENSION = ("-m", "sennit", "build-extension")


@wheel_test
def test_where_no_extension_fits_the_first_call_names_it_and_what_builds_it(
    without_extension: Environment, tmp_path: Path
) -> None:
    torch = version("torch")
    wanted = f"sennit-torch=={sennit.__version__}+torch{'.'.join(torch.split('.')[:2])}"
    refused = reduce(without_extension, tmp_path, "before").stderr
    assert f"no extension for torch {torch} and Python {platform.python_version()}; pip install '{wanted}'" in refused
    assert "sennit build-extension" in refused
    variables = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "CXX": "missing-g++"}
    no_compiler = without_extension.run(*BUILD_EXTENSION, timeout_s=COMMAND_TIMEOUT_S, **variables)
    assert (no_compiler.returncode, no_compiler.stderr) == (
        69, "error: compiler: CXX is missing-g++, which is not found; install g++, or set CXX to a compiler of C++20\n"
    )  # fmt: skip


@wheel_test
@pytest.mark.long
def test_a_command_builds_the_extension(without_extension: Environment, tmp_path: Path) -> None:
    variables = {
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "CCACHE_DIR": os.environ.get("CCACHE_DIR", str(Path.home() / ".cache" / "ccache")),
    }
    built = without_extension.run(*BUILD_EXTENSION, timeout_s=WHEEL_TIMEOUT_S, **compiler(tmp_path.parent), **variables)
    assert built.returncode == 0, built.stdout + built.stderr
    done = reduce(without_extension, tmp_path, "after")
    assert done.returncode == 0, done.stderr


def reduce(environment: Environment, folder: Path, name: str) -> subprocess.CompletedProcess[str]:
    """Runs an AllReduce of two ranks, which meet in the file `name`."""
    program, cache = folder / "all_reduce.py", str(folder / "cache")
    program.write_text(TORCH_ALL_REDUCE)
    return environment.run(str(program), str(folder / name), timeout_s=COMMAND_TIMEOUT_S, XDG_CACHE_HOME=cache)


@wheel_test
def test_the_wheels_name_what_they_need_and_are_small(wheel: Path, extension_wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        assert "Requires-Dist: torch" not in archive.read(metadata).decode()
    assert not [name for name in names if "_c10d." in name and not name.endswith(".pyi")], "the extension is apart"
    assert not [name for name in names if "/csrc/" in name or "/tests/" in name]
    minor = ".".join(version("torch").split(".")[:2])
    assert extension_wheel.name.startswith(f"sennit_torch-{sennit.__version__}+torch{minor}-cp3")
    with zipfile.ZipFile(extension_wheel) as archive:
        (metadata,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        text = archive.read(metadata).decode()
    assert f"Requires-Dist: sennit=={sennit.__version__}\n" in text
    assert f"Requires-Dist: torch=={minor}.*\n" in text
    assert wheel.stat().st_size <= CORE_MAX_BYTES
    assert extension_wheel.stat().st_size <= EXTENSION_MAX_BYTES


def linked(wheel: Path) -> Iterator[tuple[str, set[str], bool]]:
    """Yields each shared object of a wheel, the libraries that it links, and whether it has debugging information."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.endswith(".so"):
                file = ELFFile(io.BytesIO(archive.read(name)))
                dynamic: Any = file.get_section_by_name(".dynamic")
                libraries = {tag.needed for tag in dynamic.iter_tags("DT_NEEDED")}
                yield name, libraries, file.get_section_by_name(".debug_info") is not None


@wheel_test
def test_nothing_but_what_auditwheel_may_leave_or_copy_is_linked(wheel: Path, extension_wheel: Path) -> None:
    found = {path.name: list(linked(path)) for path in (wheel, extension_wheel)}
    assert len(found[wheel.name]) >= 7
    assert len(found[extension_wheel.name]) == 1
    for name, libraries, has_debugging_information in (entry for entries in found.values() for entry in entries):
        assert not has_debugging_information, name
        torchs = {"libc10.so", "libtorch.so", "libtorch_cpu.so", "libtorch_python.so"} if "_c10d" in name else set()
        assert libraries <= OF_THE_SYSTEM | OURS | COPIED | torchs, f"{name}: open it at run time, or copy it knowingly"


@wheel_test
def test_without_extras_torch_reduces_and_training_names_its_extra(with_torch: Environment) -> None:
    assert "This machine can run sennit." in succeed(with_torch, "-m", "sennit", "doctor")
    names(with_torch, [*TRAIN, "--data", "synthetic", "--ranks", "2"], "pip install 'sennit[train]'")


@pytest.mark.long
@wheel_test
@extra("train", torch=True)
def test_train_reads_flights_and_writes_for_tensorboard(made: Environment, tmp_path: Path) -> None:
    options = ("--ranks", "2", "--steps", "2", "--tensorboard", str(tmp_path / "board"))
    succeed(made, *TRAIN, "--data", "flights", *options)
    assert list((tmp_path / "board").iterdir())


@pytest.mark.long
@wheel_test
@extra("bench", torch=True)
def test_bench_draws(made: Environment, tmp_path: Path) -> None:
    options = ("--only", "allreduce", "--sizes", "4KiB", "--rounds", "1", "--plot", str(tmp_path / "figure.png"))
    succeed(made, "-m", "sennit", "bench", "collectives", *options)
    assert (tmp_path / "figure.png").stat().st_size > 0


@wheel_test
@extra("offload")
@pytest.mark.needs("clang")
def test_offload_compiles_and_reads_bpf_programs(made: Environment, tmp_path: Path) -> None:
    succeed(made, "-m", "sennit.ebpf", str(tmp_path / "objects"))
    assert list((tmp_path / "objects").glob("*.bpf.o"))
    succeed(made, "-c", "from sennit.offload.targets import xdp_receiver; xdp_receiver()")


@pytest.mark.long
@wheel_test
@extra("testbed")
def test_testbed_names_scenarios_and_simulates(made: Environment, tmp_path: Path) -> None:
    assert "hostile" in succeed(made, "-m", "sennit", "testbed", "list")
    options = ("--quick", "--only", "allreduce_8_KiB-reps", "--out", str(tmp_path / "out"))
    succeed(made, "-m", "sennit", "testbed", "simulate", *options)
    assert (tmp_path / "out" / "simulation.png").exists()


@wheel_test
@extra("telemetry")
def test_telemetry_sends_to_a_collector(made: Environment, tmp_path: Path) -> None:
    program = tmp_path / "counting.py"
    program.write_text(COUNTING)
    arrived = threading.Event()

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            arrived.set()

        def log_message(self, format: str, *arguments: object) -> None:
            del format, arguments

    with (
        http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server,
        made.start(str(program), str(tmp_path / "store")) as counting,
    ):
        assert counting.stdout is not None
        assert counting.stdout.readline() == "counting\n"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}/v1/metrics"
        sender = made.start("-m", "sennit", "metrics", "--otlp", url, "--interval", "0.1")
        try:
            has_arrived = arrived.wait(COMMAND_TIMEOUT_S)
            sender.send_signal(signal.SIGINT)
            _, errors = sender.communicate(timeout=COMMAND_TIMEOUT_S)
            assert has_arrived, errors
            assert sender.returncode == 0, errors
        finally:
            sender.kill()
            sender.communicate()
            server.shutdown()
            thread.join(COMMAND_TIMEOUT_S)


INVENTORY = """
from pathlib import Path
from pydpu.inventory import get_inventory
from sennit.offload.opi.server import Server
from sennit.offload.opi.storage import Storage

with Server("127.0.0.1:0", Storage(Path("volumes"))) as server:
    assert get_inventory(f"127.0.0.1:{server.port}").processor.total_threads >= 1
"""


@pytest.mark.long
@wheel_test
@extra("opi")
def test_opi_tells_its_own_client_what_the_machine_is(made: Environment) -> None:
    succeed(made, "-c", INVENTORY)


@wheel_test
@extra("mpi", torch=True)
def test_mpi_is_a_peer_of_the_benchmark(made: Environment) -> None:
    options = ("--only", "allreduce", "--sizes", "4KiB", "--rounds", "1", "--against", "openmpi")
    assert "openmpi" in succeed(made, "-m", "sennit", "bench", "collectives", *options)


@wheel_test
@extra("bench-fbgemm", torch=True)
def test_fbgemm_is_a_peer_of_the_benchmark(made: Environment) -> None:
    options = ("--only", "sequences, uniform", "--rounds", "1", "--against", "fbgemm")
    assert "pip install" not in succeed(made, "-m", "sennit", "bench", "embedding", *options)


@wheel_test
@extra("ray", torch=True)
def test_ray_train_and_ray_data_are_there(made: Environment) -> None:
    program = "import ray.data; from ray.train.torch import TorchConfig; print(TorchConfig(backend='sennit').backend)"
    assert succeed(made, "-c", program) == "sennit\n"


MISSING = {
    "train": ([*TRAIN, "--data", "flights"], "train"),
    "ebpf": (["-m", "sennit.ebpf", "objects"], "offload"),
    "plot": (["-m", "sennit", "bench", "collectives", "--plot", "figure.png"], "bench"),
    "testbed": (["-m", "sennit", "testbed", "list"], "testbed"),
    "metrics": (["-m", "sennit", "metrics"], "telemetry"),
    "mpi": (["-m", "sennit", "bench", "collectives", "--against", "openmpi"], "mpi"),
    "opi": (["-m", "sennit", "opi", "--listen", "127.0.0.1:0"], "opi"),
}
# Further commands that need these extras.
ALSO_MISSING = {
    "tensorboard": ([*TRAIN, "--data", "synthetic", "--tensorboard", "board"], "train"),
    "xdp": ([*TRAIN, "--ingest", "xdp://lo"], "offload"),
    "trace": (["-m", "sennit", "trace", "list"], "offload"),
    "simulate": (["-m", "sennit", "testbed", "simulate", "--quick"], "testbed"),
    "otlp": (["-m", "sennit", "metrics", "--otlp", "http://127.0.0.1:1"], "telemetry"),
}


def names(environment: Environment, arguments: list[str], command: str) -> None:
    """Checks that the command fails with one line that ends with the command to type."""
    done = environment.run(*arguments, timeout_s=COMMAND_TIMEOUT_S)
    assert done.returncode != 0, done.stdout
    (line,) = filter(None, done.stderr.splitlines())
    assert line.endswith(command), line


@wheel_test
@pytest.mark.parametrize("command", briefly([*MISSING, *ALSO_MISSING], ["ebpf"]))
def test_a_missing_extra_is_named_in_one_line(with_torch: Environment, command: str) -> None:
    arguments, name = (MISSING | ALSO_MISSING)[command]
    names(with_torch, arguments, f"pip install 'sennit[{name}]'")


@wheel_test
def test_a_missing_torch_is_named_in_one_line(bare: Environment) -> None:
    names(bare, [*TRAIN, "--data", "synthetic"], "pip install sennit-torch")
