# SPDX-License-Identifier: Apache-2.0
"""Parts of the VM that need no kernel: cache, settings of links, archive, order of modules, wrong options."""

from __future__ import annotations

import ipaddress
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from sennit import cache, debian
from sennit.commands.cli import app
from sennit.debian import StepFailed, Unavailable, require
from sennit.testbed import probes
from sennit.testbed.vm import initramfs, job, kernels, links, machines, runner, stock_kernel, uml_kernel


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "sennit"


def _make(entry: Path) -> None:
    (entry / "made").touch()
    with (entry.parent.parent / "makers").open("a") as makers:
        makers.write("one\n")


def test_an_entry_is_made_once_by_however_many(empty_cache: Path) -> None:
    # Each thread opens the lock itself, as processes do.
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda number: cache.provide("entry", _make), range(6), timeout=60))
    assert found == [empty_cache / "entry"] * 6
    assert (empty_cache / "makers").read_text() == "one\n"


def test_a_failed_or_killed_maker_leaves_nothing_half_made(empty_cache: Path) -> None:
    def fail(entry: Path) -> None:
        (entry / "half").touch()
        raise StepFailed("no")

    with pytest.raises(StepFailed):
        cache.provide("entry", fail)
    (empty_cache / ".entry-killed").mkdir()
    assert [path.name for path in cache.provide("entry", _make).iterdir()] == ["made"]
    assert {path.name for path in empty_cache.iterdir()} == {"entry", ".entry.lock", "makers"}


def test_what_a_killed_run_left_is_removed_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    young, old, lived_in = (scratch / f"{runner.SCRATCH_PREFIX}{name}" for name in ("young", "old", "lived_in"))
    for folder in (young, old, lived_in):
        folder.mkdir()
    long_ago_s = time.time() - 2 * runner.SCRATCH_STALE_S
    for folder in (old, lived_in):
        os.utime(folder, (long_ago_s, long_ago_s))
    with cache.locked(lived_in, 0), runner._scratch_folder() as mine:
        assert set(scratch.iterdir()) == {young, lived_in, mine}
    assert set(scratch.iterdir()) == {young, lived_in}


def test_the_cache_is_where_the_user_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", "/somewhere")
    assert cache.folder() == Path("/somewhere/.cache/sennit")


def test_a_missing_kernel_says_how_to_make_it() -> None:
    done = CliRunner().invoke(app, ["testbed", "vm", "--", "true"])
    assert done.exit_code == 125
    assert "run 'make kernel'" in done.output


def test_the_newest_fitting_kernel_is_found(empty_cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fitting = empty_cache / kernels._name(kernels.Kind.UML, "6.12.1-1")
    fitting.mkdir(parents=True)
    assert kernels.find(kernels.Kind.UML) == fitting
    assert kernels.provide(kernels.Kind.UML, print) == fitting  # This needs neither apt nor a compiler.
    with pytest.raises(kernels.KernelMissing):
        kernels.find(kernels.Kind.QEMU)
    changed = tmp_path / "uml.config"
    changed.write_text(uml_kernel.CONFIGURATION.read_text() + "CONFIG_BRIDGE=y\n")
    monkeypatch.setattr(uml_kernel, "CONFIGURATION", changed)
    with pytest.raises(kernels.KernelMissing):
        kernels.find(kernels.Kind.UML)


def test_a_patched_kernel_is_one_of_its_own(empty_cache: Path, tmp_path: Path) -> None:
    patch = tmp_path / "0001-one.patch"
    patch.write_text("Subject: one\n\n---\n f | 2 +-\n\ndiff --git a/f b/f\n--- a/f\n+++ b/f\n@@ -1 +1 @@\n-1\n+2\n")
    (empty_cache / kernels._name(kernels.Kind.UML, "6.12.1-1")).mkdir(parents=True)
    with pytest.raises(kernels.KernelMissing, match=f"'sennit testbed kernel uml --patch {patch}'"):
        kernels.find(kernels.Kind.UML, [patch])
    patched = empty_cache / kernels._name(kernels.Kind.UML, "6.12.1-1", [patch])
    patched.mkdir()
    patch.write_text(patch.read_text().replace("Subject: one", "Subject: better said"))
    assert kernels.find(kernels.Kind.UML, [patch]) == patched
    assert kernels.find(kernels.Kind.UML) != patched
    patch.write_text(patch.read_text().replace("+2", "+3"))
    with pytest.raises(kernels.KernelMissing):
        kernels.find(kernels.Kind.UML, [patch])


@pytest.fixture
def apt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts an apt first on the path that knows the given packages, each as `name=version`."""

    def knows(packages: str) -> None:
        folder = tmp_path / "apt"
        folder.mkdir(exist_ok=True)
        (folder / "known").write_text("".join(f"{package.replace('=', ' ')}\n" for package in packages.split()))
        script = folder / "apt-cache"
        script.write_text(
            f"""#!/bin/sh
while read -r name version; do
  case "$1 $name" in
    "pkgnames $2"*) echo "$name" ;;
    "policy $2") printf '%s:\\n  Installed: (none)\\n  Candidate: %s\\n' "$name" "$version" ;;
  esac
done <{folder}/known
"""
        )
        script.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    return knows


@pytest.mark.parametrize(
    ("known", "taken"),
    [
        ("linux-source=6.1.1 linux-source-6.1=6.1.1 linux-source-6.12=6.12.1 linux-source-6.17=6.17.1", "6.12"),
        ("linux-source=6.8.0.1 linux-source-6.8.0=6.8.0-1.1", "6.8.0"),
        ("linux-source-6.8.0=6.8.0-1.1 linux-source-6.11.0=6.11.0-1.1", "6.11.0"),
    ],
)
def test_the_newest_source_that_our_patch_fits_is_taken(apt: Callable[[str], None], known: str, taken: str) -> None:
    apt(known)
    assert uml_kernel.package_name() == f"linux-source-{taken}"
    assert kernels.key(kernels.Kind.UML).startswith(f"kernel-uml-{taken}")


@pytest.mark.parametrize(
    ("known", "said"), [("", "run 'apt-get update'"), ("linux-source-7.0.0=7", "but linux-source-7.0.0: .* Debian 12")]
)
def test_without_a_source_that_fits_those_that_are_there_are_named(
    apt: Callable[[str], None], known: str, said: str
) -> None:
    apt(known)
    with pytest.raises(Unavailable, match=f"of Linux 6.1 to 6.12.*{said}"):
        uml_kernel.package_name()


def test_the_archive_of_ubuntus_package_is_found_behind_its_link(tmp_path: Path) -> None:
    source = tmp_path / "usr/src/linux-source-6.8.0"
    source.mkdir(parents=True)
    (source / "debian").mkdir()
    (source / "linux-source-6.8.0.tar.bz2").touch()
    (source.parent / "linux-source-6.8.0.tar.bz2").symlink_to("linux-source-6.8.0/linux-source-6.8.0.tar.bz2")
    assert uml_kernel.archive(tmp_path) == source / "linux-source-6.8.0.tar.bz2"


def test_the_key_for_caches_follows_version_and_patches(apt: Callable[[str], None], tmp_path: Path) -> None:
    def key(*options: str) -> str:
        done = CliRunner().invoke(app, ["testbed", "kernel", "--key", *options])
        assert done.exit_code == 0, done.output
        return done.output.strip()

    patch = tmp_path / "0001-one.patch"
    patch.write_text("--- a/f\n+++ b/f\n@@ -1 +1 @@\n-1\n+2\n")
    apt("linux-source-6.12=6.12.1-1")
    first = key()
    assert first == key("uml") == kernels._name(kernels.Kind.UML, "6.12.1-1")
    assert key("uml", "--patch", str(patch)) == kernels._name(kernels.Kind.UML, "6.12.1-1", [patch])
    apt("linux-source-6.12=6.12.2-1")
    assert key() not in (first, key("uml", "--patch", str(patch)))
    assert not cache.folder().exists()


@pytest.mark.parametrize("kind", kernels.Kind)
def test_the_default_memory_is_what_there_is_room_for(
    kind: kernels.Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machines, "MEMINFO", tmp_path / "meminfo")

    def room(free_bytes: int) -> int:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free_bytes))
        machines.MEMINFO.write_text(f"MemTotal:  900000000000 kB\nMemAvailable:   {free_bytes >> 10} kB\n")
        return machines.MACHINES[kind](tmp_path).default_memory_bytes()

    assert room(1 << 40) == 4 << 30
    assert room(2 << 30) == 1536 << 20
    assert room(0) == 64 << 20


def test_another_processor_is_refused_before_anything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(machine="aarch64"))
    monkeypatch.setattr(debian, "execute", lambda *arguments, **options: pytest.fail("asked apt, or made something"))
    monkeypatch.setenv("PATH", "")
    for command, code in (
        (["kernel"], 69),
        (["kernel", "qemu"], 69),
        (["kernel", "--key"], 69),
        (["vm", "--", "true"], 125),
        (["vm", "--kernel", "uml", "--", "true"], 125),
        (["vm", "--make-kernel", "--", "true"], 125),
    ):
        done = CliRunner().invoke(app, ["testbed", *command])
        assert done.exit_code == code, done.output
        assert "a processor of x86_64, and this machine has aarch64" in done.output
    assert "aarch64" in probes._vm().detail


def test_a_system_without_debians_kernel_is_named(apt: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    apt("linux-source-6.8.0=6.8.0-1.1")
    monkeypatch.setattr(machines.Qemu, "tools", (("no-such-emulator", "qemu-system-x86"),))
    for system, said in (
        ({"NAME": "Ubuntu", "VERSION_ID": "24.04"}, "and Ubuntu 24.04 does not have it: take uml"),
        ({"NAME": "Debian GNU/Linux", "VERSION_ID": "12"}, "run 'apt-get update'"),
    ):
        monkeypatch.setattr(platform, "freedesktop_os_release", lambda system=system: system)
        for options in ([], ["--key"]):
            done = CliRunner().invoke(app, ["testbed", "kernel", "qemu", *options])
            assert done.exit_code == 69
            assert said in done.output


def test_a_system_without_apt_is_no_system_that_lacks_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "freedesktop_os_release", lambda: {"NAME": "Fedora Linux", "VERSION_ID": "42"})
    monkeypatch.setenv("PATH", "")
    for look in (uml_kernel.package_name, stock_kernel.package_name):
        with pytest.raises(Unavailable, match="package of Debian or Ubuntu: Fedora Linux 42 has no apt-get"):
            look()


def test_a_compiler_without_the_c_library_is_said_to_lack_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "bin/gcc"
    compiler.parent.mkdir()
    compiler.write_text(
        '#!/bin/sh\ncase $1 in -print-file-name=*) echo "${1#*=}" ;; *) echo "no errno.h"; exit 1 ;; esac\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(compiler.parent))
    with pytest.raises(Unavailable, match=r"needs libc\.a: apt-get install libc6-dev"):
        kernels.guest_program()


def test_a_program_that_does_not_end_is_a_step_that_failed() -> None:
    with pytest.raises(StepFailed, match=r"'sleep 60 ...' did not end within 0\.01 s"):
        debian.execute(["sleep", "60"], timeout_s=0.01)


def test_the_tool_needs_nothing_that_has_to_be_built() -> None:
    # Importable without the native parts (docs/how-to/soft-roce-vm.md), and quickly.
    modules = "sennit.commands.cli, sennit.testbed.vm.commands, sennit.testbed.vm.runner"
    code = f"import sys, {modules}; print([m for m in ('torch', 'numpy', 'sennit.transport') if m in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert loaded.stdout == "[]\n"


def test_missing_tools_are_named_with_their_packages() -> None:
    with pytest.raises(Unavailable, match="needs no-such, nor-this: apt-get install one two"):
        require([("sh", "dash"), ("no-such", "two"), ("nor-this", "one")], "it")


def test_all_that_is_missing_is_named_at_once(
    apt: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    apt("linux-source-6.8.0=6.8.0-1.1")
    for program in ("apt-get", "dpkg"):
        (tmp_path / "apt" / program).symlink_to("/bin/true")
    monkeypatch.setenv("PATH", str(tmp_path / "apt"))
    done = CliRunner().invoke(app, ["testbed", "kernel", "uml"])
    assert done.exit_code == 69
    names = "make, gcc, flex, bison, bc, tar, patch, bzip2, ip, rdma, tc, setpriv"
    packages = "bc bison bzip2 flex gcc libc6-dev iproute2 make patch tar util-linux"
    assert f"a VM of the kind uml needs {names}: apt-get install {packages}" in " ".join(done.output.split())


def test_lines_that_a_kernel_does_not_take_are_named() -> None:
    with pytest.raises(StepFailed, match=r"CONFIG_B=y, CONFIG_D=7$"):
        uml_kernel.check_configuration(
            "# c\n\nCONFIG_A=y\nCONFIG_B=y\nCONFIG_D=7\n", "CONFIG_A=y\n# CONFIG_B is not set\nCONFIG_D=70\n"
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--links", "65"], "must be 0 to 64"),
        (["--mtu", "576"], "must be 1280 to 65535"),
        (["--netem", "rxe2=loss 1%"], "rxe0 to rxe1"),
        (["--netem", "roce0=loss 1%"], "rxeN=settings"),
        (["--netem", "rxe0="], "sets nothing"),
        (["--memory", "much"], "K, M or G"),
        (["--memory", "1M"], "at least 64"),
        (["--timeout", "0"], "above 0"),
        (["--env", "NAME"], "NAME=VALUE"),
        (["--kernel", "xen"], "xen"),
        (["--patch", "no-such.patch"], "there is no patch no-such.patch"),
        (["--patch", __file__], "changes no file"),
        (["--kernel", "qemu", "--patch", __file__], "only the uml kernel can be patched"),
    ],
)
def test_wrong_options_exit_with_2(options: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["testbed", "vm", *options, "--", "true"])
    assert done.exit_code == 2
    assert message in " ".join(done.output.split())


def test_netem_of_one_device_replaces_that_of_all() -> None:
    made = links.Links(count=1, netem=("loss 1%", "rxe1=delay 5ms limit 3"))
    assert made.netem_by_device() == {0: "limit 10000 loss 1%", 1: "delay 5ms limit 3"}
    assert links.Links(count=0, netem=()).netem_by_device() == {}


def test_gids_are_written_as_the_kernel_does() -> None:
    assert links.gid(3, 4) == "0000:0000:0000:0000:0000:ffff:0a4d:0102"
    assert links.gid(3, 6) == "fd5e:0077:0002:0000:0000:0000:0000:0002"


def test_gids_are_the_same_where_python_writes_mapped_addresses_in_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    as_in_python_3_13 = property(lambda address: f"0000:0000:0000:0000:0000:ffff:{address.ipv4_mapped}")
    monkeypatch.setattr(ipaddress.IPv6Address, "exploded", as_in_python_3_13)
    assert links.gid(3, 4) == "0000:0000:0000:0000:0000:ffff:0a4d:0102"


def test_a_job_is_counted_strings() -> None:
    assert job.encode([("mkdir", "/a b"), ("run", "", "ip", "\udcff")]) == (
        b"2\0mkdir\0/a b\0" + b"4\0run\0" + b"\0" + b"ip\0" + b"\xff\0"
    )
    with pytest.raises(ValueError, match="NUL"):
        job.encode([("env", "A", "b\0c")])


def test_an_archive_is_what_the_kernel_reads() -> None:
    """Compares each field with Documentation/driver-api/early-userspace/buffer-format.rst."""
    data = initramfs.archive([initramfs.folder("dev"), initramfs.console(), initramfs.file("init", b"12345", 0o755)])
    found: list[tuple[str, int, tuple[int, int], bytes]] = []
    at = 0
    while not found or found[-1][0] != "TRAILER!!!":
        assert data[at : at + 6] == b"070701"
        fields = [int(data[at + 6 + 8 * field : at + 14 + 8 * field], 16) for field in range(13)]
        name_end = at + 110 + fields[11]
        start = -(-name_end // 4) * 4
        content = data[start : start + fields[6]]
        found.append((data[at + 110 : name_end - 1].decode(), fields[1], (fields[9], fields[10]), content))
        at = -(-(start + fields[6]) // 4) * 4
    assert at == len(data)
    assert found[:3] == [
        ("dev", stat.S_IFDIR | 0o755, (0, 0), b""),
        ("dev/console", stat.S_IFCHR | 0o600, (5, 1), b""),
        ("init", stat.S_IFREG | 0o755, (0, 0), b"12345"),
    ]


def test_modules_come_after_what_they_depend_on(tmp_path: Path) -> None:
    (tmp_path / "kernel").mkdir()
    (tmp_path / "modules.builtin").write_text("kernel/core/built-in.ko\n")
    depends = {"rxe": "ib_core,udp-tunnel,built_in", "ib_core": "", "udp-tunnel": "ib_core", "netem": ""}
    for name, names in depends.items():
        (tmp_path / "kernel" / f"{name}.ko").write_bytes(b"\0license=GPL\0depends=" + names.encode() + b"\0name=x\0")
    order = [path.stem for path in stock_kernel.loading_order(tmp_path, ("netem", "built-in", "rxe", "ib_core"))]
    assert order == ["netem", "ib_core", "udp-tunnel", "rxe"]
    with pytest.raises(StepFailed, match="no module siw"):
        list(stock_kernel.loading_order(tmp_path, ("siw",)))
