# SPDX-License-Identifier: Apache-2.0
"""Data sets of users: registered, of an installed package, or named as `package.module:function`."""

from __future__ import annotations

import re
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest

from sennit.errors import ConfigError
from sennit.runtime.data import sources
from sennit.runtime.data.errors import DataError
from sennit.runtime.data.samples import Samples
from sennit.runtime.data.source import Source
from tests.runtime.trainer_runs import samples
from tests.runtime.whole_run import train

HERE = "tests.runtime.test_data_sets"
PAGE = Path(__file__).parents[2] / "docs/reference/data-sets.md"


def clicks(source: Source, seed: int) -> Samples:
    """A user's function."""
    return samples(seed, count=source.samples)


def nothing(source: Source, seed: int) -> None:
    return None


def other_arguments(path: str) -> Samples:
    return samples(int(path))


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten after it."""
    monkeypatch.setattr(sources, "_registered", dict(sources._registered))


def test_a_function_is_a_data_set_however_it_is_named(names: None, monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint(name="packaged", value=f"{HERE}:clicks", group=sources.ENTRY_POINTS)
    points = EntryPoints([point])
    monkeypatch.setattr(sources, "entry_points", lambda **which: points.select(**which))
    sources.register("clicks", clicks)
    for name in ("clicks", "packaged", f"{HERE}:clicks"):
        source = Source(data=name, samples=77)
        sources.check(source)
        sources.check_code(source)
        raw = sources.load(source, seed=5)
        assert (raw.name, len(raw)) == ("small", 77)
        assert raw.labels.tolist() == samples(5, 77).labels.tolist()
    with pytest.raises(
        DataError, match=r"--min-frequency 2, but no column of packaged has a dictionary; allowed: with"
    ):
        sources.load(Source(data="packaged", min_frequency=2), seed=5)
    with pytest.raises(DataError, match="--schema belongs to files, but the data set is 'packaged'"):
        sources.check(Source(data="packaged", schema=Path("x.toml")))


@pytest.mark.parametrize(
    ("name", "error", "what"),
    [
        (f"{HERE}:nothing", DataError, "returned a NoneType; allowed: Samples or RawSamples of sennit.runtime.data"),
        (f"{HERE}:HERE", DataError, "is a str; allowed: a function that returns samples"),
        (f"{HERE}:click", ConfigError, "has no click; did you mean clicks"),
        (f"{HERE}:other_arguments", ConfigError, "but gets two, source, seed: too many positional arguments"),
        ("no_such_module:load", ConfigError, "there is no module no_such_module in "),
    ],
)
def test_what_is_wrong_with_a_function_is_said(name: str, error: Any, what: str) -> None:
    with pytest.raises(error, match=what):
        sources.load(Source(data=name), seed=1)


@pytest.mark.parametrize(
    ("name", "what"),
    [("flights", "'flights' exists already"), ("a/b", "'a/b'; allowed: a name without"), ("m:f", "'m:f'; allowed:")],
)
def test_a_name_that_cannot_be_is_refused(names: None, name: str, what: str) -> None:
    with pytest.raises(DataError, match=what):
        sources.register(name, clicks)


def test_the_command_trains_on_the_program_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (program,) = [text for text in programs if "my_data.py" in text]
    (tmp_path / "my_data.py").write_text(program)
    monkeypatch.chdir(tmp_path)
    options = ["--model", "dcnv2", "--samples", "300", "--batch-size", "32", "--dim", "4", "--steps", "3"]
    found = [
        train(tmp_path / f"{ranks}.json", "--data", "my_data:clicks", *options, "--ranks", str(ranks))
        for ranks in (1, 2)
    ]
    assert len({report["weights_sha256"] for report in found}) == 1
    # Fifty cities, and row 0.
    assert found[0]["embedding"]["table_numbers"] == 51 * 4
