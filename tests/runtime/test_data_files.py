# SPDX-License-Identifier: Apache-2.0
"""Where Parquet files can be: parts, patterns, folders, several paths, and other filesystems."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sennit.runtime.data import local_folder, sources
from sennit.runtime.data.errors import DataError, MissingPackage
from sennit.runtime.data.files import find_files
from sennit.runtime.data.source import Source

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
fsspec = pytest.importorskip("fsspec")

SCHEMA = 'label = "clicked"\n[sparse.user]\nrows = 100\n'


def table(first: int, count: int = 3, **changed: Any) -> Any:
    numbers = arrow.int64()
    users = arrow.array(range(first, first + count), numbers)
    return arrow.table({"clicked": arrow.array([0] * count, numbers), "user": users, **changed})


def write(url: str, content: Any) -> None:
    with fsspec.open(url, "wb") as stream:
        parquet.write_table(content, stream, row_group_size=2)


@pytest.fixture
def schema(tmp_path: Path) -> Path:
    path = tmp_path / "schema.toml"
    path.write_text(SCHEMA)
    return path


def users(schema: Path, *paths: str) -> list[int]:
    found = sources.load(Source(data=paths[0], further=paths[1:], schema=schema), seed=1)
    return [int(value) for value in found.features[0].values]


@pytest.fixture(params=["local", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A folder with two parts, one of them in a subfolder, and other files."""
    root = str(tmp_path / "set") if request.param == "local" else "memory://set"
    filesystem, path = fsspec.core.url_to_fs(root)
    filesystem.makedirs(f"{path}/day=2", exist_ok=True)
    filesystem.makedirs(f"{path}/_temporary", exist_ok=True)
    write(f"{root}/part-1.parquet", table(10))
    write(f"{root}/day=2/part-0.parquet", table(0))
    write(f"{root}/_temporary/part-9.parquet", table(90))
    write(f"{root}/.part-8.parquet", table(80))
    with fsspec.open(f"{root}/_SUCCESS", "wb") as stream:
        stream.write(b"")
    yield root
    filesystem.rm(path, recursive=True)


def test_a_folder_is_its_parts_in_the_order_of_their_names(folder: str, schema: Path) -> None:
    assert users(schema, folder) == [0, 1, 2, 10, 11, 12]


def test_a_pattern_and_several_paths(folder: str, schema: Path) -> None:
    assert users(schema, f"{folder}/part-*.parquet") == [10, 11, 12]
    assert users(schema, f"{folder}/part-1.parquet", f"{folder}/day=2") == [10, 11, 12, 0, 1, 2]


def test_every_complaint_names_the_file_column_and_row_group(folder: str, schema: Path) -> None:
    write(f"{folder}/part-2.parquet", table(98))
    with pytest.raises(DataError, match=r"set/part-2\.parquet: column user, row group 1, row 0: row id 100; allowed"):
        users(schema, folder)
    write(f"{folder}/part-2.parquet", table(0, user=[[1], [2], [3]]))
    with pytest.raises(DataError, match=r"part-2\.parquet: column user is list.*, but in .*part-0.* int64"):
        users(schema, folder)
    write(f"{folder}/part-2.parquet", table(0).drop(["user"]))
    with pytest.raises(DataError, match=r"part-2\.parquet: no column user; there are: clicked"):
        users(schema, folder)
    with fsspec.open(f"{folder}/part-2.parquet", "wb") as stream:
        stream.write(b"PAR1")
    with pytest.raises(DataError, match=r"set/part-2\.parquet: not a readable Parquet file"):
        users(schema, folder)


def test_a_part_without_rows_is_nothing(folder: str, schema: Path) -> None:
    write(f"{folder}/part-2.parquet", table(0, 0))
    assert users(schema, folder) == [0, 1, 2, 10, 11, 12]
    with pytest.raises(DataError, match=r"part-2\.parquet: no rows"):
        users(schema, f"{folder}/part-2.parquet")


def test_a_folder_has_one_format(folder: str) -> None:
    with fsspec.open(f"{folder}/day=2/names.csv.gz", "wb") as stream:
        stream.write(b"")
    message = (
        r"has CSV files and Parquet files \(.*set/day=2/part-0\.parquet\); allowed in a folder: one format; give a"
    )
    with pytest.raises(DataError, match=message):
        find_files([folder])
    assert len(find_files([f"{folder}/*.parquet"])) == 1
    assert [file.format for file in find_files([f"{folder}/day=2/*"])] == ["CSV", "Parquet"]


def test_names_in_capitals_and_short_ones_say_their_format(folder: str) -> None:
    for name in ("B.PARQUET", "c.parq", "d.pq"):
        write(f"{folder}/{name}", table(0))
    assert [file.name.rpartition("/")[2] for file in find_files([folder])] == [
        "B.PARQUET", "c.parq", "d.pq", "part-0.parquet", "part-1.parquet"
    ]  # fmt: skip
    assert [file.format for file in find_files([f"{folder}/day=2", f"{folder}/B*"])] == ["Parquet"] * 2


@pytest.mark.parametrize(
    "name", ["f.csv.lz4", "F.CSV.ZIP", "f.parquet.gz", "f.jsonl", "f.ndjson.gz", "f.orc", "f.avro", "f.txt.xz"]
)
def test_data_of_a_format_that_is_not_read_are_not_left_out(folder: str, name: str) -> None:
    with fsspec.open(f"{folder}/day=2/{name}", "wb") as stream:
        stream.write(b"")
    for path in (folder, f"{folder}/day=2", f"{folder}/day=*"):
        with pytest.raises(
            DataError, match=rf"set/day=2/{name}, which cannot be read; allowed in a folder: \*\.parquet"
        ):
            find_files([path])
    assert len(find_files([f"{folder}/**/*.parquet"])) == 2


@pytest.mark.parametrize(
    "name", ["schema.toml", "state.json", "notes", "run.py.gz", "_f.orc", "f.parquet.tmp", "archive.zip"]
)
def test_what_is_no_data_by_its_name_is_left_out(folder: str, name: str) -> None:
    with fsspec.open(f"{folder}/{name}", "wb") as stream:
        stream.write(b"")
    assert len(find_files([folder])) == 2


def test_a_pattern_reads_folders_and_finds_nothing_that_is_hidden(folder: str) -> None:
    filesystem, root = fsspec.core.url_to_fs(folder)

    def names(path: str) -> list[str]:
        return [file.path.removeprefix(root) for file in find_files([path])]

    assert names(f"{folder}/*") == ["/day=2/part-0.parquet", "/part-1.parquet"]
    assert names(f"{folder}/day=*") == ["/day=2/part-0.parquet"]
    # Both match the folder and its file.
    assert names(f"{folder}/**") == names(folder)
    assert names(f"{folder}/**/*.parquet") == names(folder)
    assert names(f"{folder}/_*/*.parquet") == ["/_temporary/part-9.parquet"]
    assert names(f"{folder}/.part*") == ["/.part-8.parquet"]
    filesystem.mkdir(f"{root}/.kept")
    write(f"{folder}/.kept/part-7.parquet", table(70))
    assert names(f"{folder}/.kept/*.parquet") == ["/.kept/part-7.parquet"]
    assert names(f"{folder}/**") == names(folder)


def test_a_file_is_given_once(folder: str, schema: Path) -> None:
    for paths in ((folder, folder), (f"{folder}/part-1.parquet", f"{folder}/*.parquet"), (folder, f"{folder}/day=2")):
        with pytest.raises(DataError, match=r"part-.\.parquet: given twice; allowed: each file once"):
            find_files(paths)
    with pytest.raises(DataError, match=r"part-1\.parquet: given twice"):
        sources.check(Source(data=folder, schema=schema, evaluation=(f"{folder}/*.parquet",)))


@pytest.fixture
def linked(tmp_path: Path) -> Path:
    """A folder of two days, one of which lies elsewhere."""
    for path in ("logs/day=1", "other/day=2/sub"):
        (tmp_path / path).mkdir(parents=True)
    for name in ("logs/day=1/a", "other/day=2/b", "other/day=2/sub/c"):
        parquet.write_table(table(0), tmp_path / f"{name}.parquet")
    (tmp_path / "logs" / "day=2").symlink_to("../other/day=2")
    return tmp_path / "logs"


def test_links_to_folders_are_followed_but_not_back_into_themselves(linked: Path) -> None:
    every = [f"{linked}/{name}.parquet" for name in ("day=1/a", "day=2/b", "day=2/sub/c")]

    def check() -> None:
        for pattern in ("", "/*", "/**", "/**/*.parquet"):
            assert [file.path for file in find_files([f"{linked}{pattern}"])] == every, pattern
        assert [file.path for file in find_files([f"{linked}/day=*/*.parquet"])] == every[:2]

    check()
    # The root of the disk has these files, too.
    for name, place in (("loop", "."), ("day=1/up", ".."), ("root", "/"), ("lost", "nowhere"), ("self", "self")):
        (linked / name).symlink_to(place)
        if name not in ("lost", "self"):
            check()
    # In a folder, what is no data is no matter. A pattern has it.
    assert [file.path for file in find_files([str(linked)])] == every
    with pytest.raises(DataError, match=r"No such file|Too many levels"):
        find_files([f"{linked}/*"])


def test_a_file_under_a_second_name_is_given_twice(linked: Path, schema: Path) -> None:
    (linked / "day=1" / "latest.parquet").symlink_to("a.parquet")
    message = r"latest\.parquet: given twice, also as .*/day=1/a\.parquet; allowed: each file once"
    with pytest.raises(DataError, match=message):
        find_files([str(linked)])
    train, held = (str(linked / "day=1" / f"{name}.parquet") for name in ("a", "latest"))
    with pytest.raises(DataError, match=message):
        sources.check(Source(data=train, schema=schema, evaluation=(held,)))
    (linked / "day=1" / "latest.parquet").unlink()
    (linked / "latest").symlink_to("day=2")
    with pytest.raises(DataError, match=r"latest/b\.parquet: given twice, also as .*/day=2/b\.parquet"):
        find_files([str(linked)])


@pytest.mark.parametrize("name", ["my [v2] data", "what?", "a*b", "a::b", "[ab]"])
def test_a_path_that_exists_is_no_pattern(name: str, tmp_path: Path) -> None:
    for path in (tmp_path / f"{name}.parquet", tmp_path / name / f"{name}.parquet"):
        path.parent.mkdir(exist_ok=True)
        parquet.write_table(table(0), path)
    parquet.write_table(table(0), tmp_path / "axb.parquet")
    inner = f"{name}/{name}.parquet"
    for given, expected in (
        (f"{name}.parquet", f"{name}.parquet"),
        (name, inner),
        (f"{name}/*", inner),
        (inner, inner),
    ):
        (file,) = find_files([str(tmp_path / given)])
        assert file.path == str(tmp_path / expected)


def test_what_can_be_read_once_alone_is_refused(tmp_path: Path, schema: Path) -> None:
    os.mkfifo(tmp_path / "pipe.parquet")
    (tmp_path / "link.parquet").symlink_to("pipe.parquet")
    (tmp_path / "gone.parquet").symlink_to("nothing")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "zero.csv").symlink_to("/dev/zero")
    for path in ("pipe.parquet", "p*.parquet", "link.parquet", "set", "set/*"):
        with pytest.raises(DataError, match=r"(pipe|link|zero)\.\w+: a FIFO, a socket or a device; allowed: files"):
            find_files([str(tmp_path / path)])
    with pytest.raises(DataError, match=r"data set '.*/gone\*': .*No such file"):
        find_files([str(tmp_path / "gone*")])


def test_what_is_not_there_is_named(folder: str, schema: Path) -> None:
    for path in (f"{folder}/absent.parquet", f"{folder}/*.csv", "memory://nowhere"):
        with pytest.raises(DataError, match="no such file, and no folder or pattern"):
            sources.check(Source(data=path, schema=schema))
    with pytest.raises(DataError, match=r"data set 'nonsense://x': .*[Pp]rotocol"):
        find_files(["nonsense://x"])
    with pytest.raises(DataError, match="data sets 'flights' and 'x'; allowed: one, or several paths"):
        sources.check(Source(data="flights", further=("x",)))


@pytest.fixture
def exhausted(folder: str) -> Iterator[None]:
    """This process can open no more files, all modules being there."""
    (file,) = find_files([f"{folder}/part-1.parquet"])
    with file.open(), file.open_native():
        pass
    before, held = resource.getrlimit(resource.RLIMIT_NOFILE), list[int]()
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, before[1]))
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for descriptor in held:
            os.close(descriptor)


@pytest.mark.parametrize("folder", ["local"], indirect=True)
def test_want_of_descriptors_names_the_limit_and_what_a_stream_needs(folder: str, exhausted: None) -> None:
    advice = (
        r"Too many open files.*\. This process may have \d+ files open: raise that by `ulimit -n` .* --slices by the"
    )
    for path in (folder, f"{folder}/*.parquet", f"{folder}/**"):
        with pytest.raises(DataError, match=rf"data set '{re.escape(path)}': .*{advice}"):
            find_files([path])
    (file,) = find_files([f"{folder}/part-1.parquet"])
    for opened in (file.open, file.open_native):
        with pytest.raises(DataError, match=rf"set/part-1\.parquet: .*{advice}"), opened():
            pass


@pytest.mark.parametrize("folder", ["local"], indirect=True)
def test_files_in_a_folder_that_cannot_be_listed_are_not_left_out(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    list_folder: Any = os.scandir
    error: OSError = PermissionError(errno.EACCES, "Permission denied")

    def refuse(path: Any = ".") -> Any:
        if str(path).endswith("day=2"):
            raise error
        return list_folder(path)

    monkeypatch.setattr(os, "scandir", refuse)
    for path in (folder, f"{folder}/*", f"{folder}/day*/*", f"{folder}/day=2/*", f"{folder}/**/*.parquet"):
        with pytest.raises(DataError, match=rf"data set '{re.escape(path)}': .*Permission denied"):
            find_files([path])
    # A pattern does not look into it.
    assert len(find_files([f"{folder}/part*"])) == 1
    # Nobody but root may list this folder of a disk.
    monkeypatch.setattr(local_folder, "LOST_AND_FOUND", "day=2")
    assert len(find_files([folder])) == 1
    # What is removed while others look is not there.
    error = FileNotFoundError(errno.ENOENT, "No such file or directory")
    assert [file.path.rpartition("/")[2] for file in find_files([folder])] == ["part-1.parquet"]


def test_a_protocol_without_its_package_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(MissingPackage, match="Install s3fs"):
        find_files(["s3://bucket/x.parquet"])


def test_a_filesystem_that_fails_while_it_is_read_is_named(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (file,) = find_files([f"{folder}/part-1.parquet"])

    class Broken(Exception):
        pass

    def fail(*_: object, **__: object) -> None:
        raise Broken("the cable")

    monkeypatch.setattr(type(file.filesystem), "open", fail)
    with pytest.raises(DataError, match=r"part-1\.parquet: Broken: the cable"), file.open():
        pass


def test_an_object_store_that_fails_behind_a_proxy_names_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unreachable(type(fsspec.filesystem("memory"))):  # type: ignore[misc]
        protocol = "unreachable"

        def isdir(self, path: str) -> bool:
            raise TimeoutError(f"no answer for {path}")

    fsspec.register_implementation("unreachable", Unreachable, clobber=True)
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    with pytest.raises(DataError, match=r"no answer for [^()]*$"):
        find_files(["unreachable://x"])
    monkeypatch.setenv("HTTPS_PROXY", "http://user:secret@10.0.0.1:3128")
    with pytest.raises(DataError, match=r"no answer for .* \(HTTPS_PROXY set; .*; export no_proxy=") as caught:
        find_files(["unreachable://x"])
    assert "secret" not in str(caught.value)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A bucket in a server on this machine that speaks S3."""
    pytest.importorskip("s3fs")
    pytest.importorskip("moto")
    program = (
        "import logging; logging.disable()\n"
        "from moto.server import ThreadedMotoServer\n"
        "server = ThreadedMotoServer('127.0.0.1', 0); server.start()\n"
        "print('ready', *server.get_host_and_port(), flush=True); input()"
    )
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=dict(os.environ)) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        # The web server prints other lines first.
        lines = (line.decode().split() for line in server.stdout)
        _, host, port = next(words for words in lines if words[0] == "ready")
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        filesystem = fsspec.filesystem("s3", skip_instance_cache=True)
        filesystem.mkdir("data")
        yield "s3://data"
        server.stdin.close()


@pytest.mark.slow
def test_s3(bucket: str, schema: Path) -> None:
    for part, first in (("1", 10), ("0", 0)):
        write(f"{bucket}/set/part-{part}.parquet", table(first))
    assert users(schema, f"{bucket}/set") == [0, 1, 2, 10, 11, 12]
    assert users(schema, f"{bucket}/set/*-1.parquet") == [10, 11, 12]
    with pytest.raises(DataError, match="no such file"):
        users(schema, f"{bucket}/absent")
    write(f"{bucket}/set/part-9.parquet", table(98))
    with pytest.raises(DataError, match=r"s3://data/set/part-9\.parquet: column user, row group 1, row 0: row id 100"):
        users(schema, f"{bucket}/set")
