# SPDX-License-Identifier: Apache-2.0
"""The agent's file: who may have what, and each mistake by name."""

from __future__ import annotations

import grp
import os
import pwd
import tomllib
from pathlib import Path

import pytest

from sennit.errors import ConfigError
from sennit.offload.agent.permissions import permissions_of, read_permissions

ROOT = Path(__file__).resolve().parents[2]
TABLE = """
[[allow]]
users = [1001]
groups = [50]
interfaces = ["eth0", "eth1"]
ports = [4800, 4809]
"""


def test_users_and_members_of_groups_have_what_their_tables_say() -> None:
    second = TABLE.replace("1001", "1002").replace('"eth0", ', "").replace("[4800, 4809]", "[5000, 5000]")
    found = permissions_of(tomllib.loads(TABLE + second + "leases = 1\nmemory_mib = 5\n"))
    first, last = found.grants
    assert found.of(1001, frozenset()) == (first,)
    assert found.of(1002, frozenset({7})) == (last,)
    assert found.of(3, frozenset({50, 7})) == (first, last)
    assert found.of(0, frozenset({0})) == (), "root is a user like others"
    assert (first.leases, first.memory_mib, last.leases, last.memory_mib) == (8, 1024, 1, 5)
    assert first.covers("eth0", 4800)
    assert first.covers("eth1", 4809)
    assert not first.covers("eth0", 4810)
    assert not last.covers("eth0", 5000)
    assert found.ports_at("eth1") == range(4800, 5001)
    assert found.ports_at("eth0") == range(4800, 4810)


def test_names_are_those_of_the_machine() -> None:
    user, group = pwd.getpwuid(0).pw_name, grp.getgrgid(0).gr_name
    named = TABLE.replace("1001", f'"{user}"').replace("50", f'"{group}"')
    assert permissions_of(tomllib.loads(named)).grants[0].users == {0}
    with pytest.raises(ConfigError, match="allow 1: users 'nobody-here'; allowed: those that this machine knows"):
        permissions_of(tomllib.loads(TABLE.replace("1001", '"nobody-here"')))


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("[[allow]]", "[[deny]]", "the file: 'deny'; allowed: allow"),
        ("users", "user", "allow 1: 'user'; allowed: users, groups, .*; did you mean users?"),
        ("users = [1001]\ngroups = [50]", "", "allow 1: neither users nor groups; allowed: some of either"),
        ("[1001]", "1001", "allow 1: users 1001; allowed: a list of names and numbers"),
        ("[1001]", "[true]", "allow 1: users True; allowed: 0 to 4294967294"),
        ("[1001]", "[-1]", "allow 1: users -1; allowed: 0 to"),
        ('"eth0", ', '"", ', "allow 1: interface ''; allowed: names of 1 to 15 bytes"),
        ('["eth0", "eth1"]', "[]", r"allow 1: interfaces \[\]; allowed: a list of names"),
        ("[4800, 4809]", "[4809, 4800]", r"allow 1: ports \[4809, 4800\]; allowed: \[first, last\]"),
        ("[4800, 4809]", "[4800]", r"allow 1: ports \[4800\]; allowed: \[first, last\]"),
        ("[4800, 4809]", "[0, 4809]", "allow 1: ports 0; allowed: 1 to 65535"),
        ("ports", "leases = 65\nports", "allow 1: leases 65; allowed: 1 to 64"),
        ("ports", "memory_mib = 0\nports", "allow 1: memory_mib 0; allowed: 1 to"),
        ("ports = [4800, 4809]", "", "allow 1: ports None; allowed"),
    ],
)
def test_a_mistake_is_named(old: str, new: str, told: str) -> None:
    assert old in TABLE
    with pytest.raises(ConfigError, match=f"^{told}"):
        permissions_of(tomllib.loads(TABLE.replace(old, new)))


def test_a_file_that_others_may_change_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "agent.toml"
    file.write_text(TABLE)
    for mode in (0o620, 0o602):
        file.chmod(mode)
        with pytest.raises(ConfigError, match="others may change it; allowed: of root or this user, and mode 0644"):
            read_permissions(file)
    file.chmod(0o644)
    assert len(read_permissions(file).grants) == 1
    for content in (b"allow = 1 = 2", b"\xff\xfe", b"a" * 3_000_000, b"[" * 100_000):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=str(file)):
            read_permissions(file)
    for path in (tmp_path / "none", tmp_path, Path("/dev/zero")):
        with pytest.raises(ConfigError, match=str(path)):
            read_permissions(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "agent.toml"
    file.write_text(TABLE)
    os.chown(file, 12_345, -1)
    with pytest.raises(ConfigError, match="others may change it"):
        read_permissions(file)


def test_the_file_that_users_take_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grp, "getgrnam", lambda name: grp.struct_group((name, "x", 100, [])))
    path = ROOT / "examples/cluster/systemd/agent.toml"
    found = permissions_of(tomllib.loads(path.read_text()))
    assert found.grants[0].groups == {100}
    page = (ROOT / "docs/how-to/unprivileged.md").read_text()
    shown = page.partition("```toml\n")[2].partition("```")[0]
    monkeypatch.setattr(pwd, "getpwnam", lambda name: pwd.struct_passwd((name, "x", 7, 7, "", "", "")))
    assert permissions_of(tomllib.loads(shown)).grants[0].users == {7, 1001}
