# SPDX-License-Identifier: Apache-2.0
"""examples/kafka_to_files.py with a consumer that has the interface of confluent_kafka: each message once, in order."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from sennit.runtime.data.errors import DataError
from sennit.runtime.data.seeds import numpy_stream
from sennit.runtime.stream.index import open_index

pytest.importorskip("pyarrow")

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "kafka_to_files.py"
BEGINNING = -2


class Message(SimpleNamespace):
    def value(self) -> bytes:
        return json.dumps(self.row).encode()

    def partition(self) -> int:
        return int(self.at[0])

    def offset(self) -> int:
        return int(self.at[1])

    def error(self) -> str | None:
        return str(self.wrong) if self.wrong else None


class Topic:
    """A topic with three partitions, whose messages come in an order of chance."""

    def __init__(
        self, seed: int, count: int, *, broken_after: int | None = None, wrong: str = "", more: Any = lambda row: {}
    ) -> None:
        self._stream = numpy_stream(seed, "topic")
        self._wrong, self._left = wrong, broken_after
        self._rows = [
            [{"id": 3 * row + part, "price": row / 4} | more(row) for row in range(count)] for part in range(3)
        ]
        self._next: dict[int, int] = {}
        self.given: dict[str, Any] = {}

    def module(self) -> ModuleType:
        made = ModuleType("confluent_kafka")

        def consumer(options: dict[str, Any]) -> Topic:
            self.given = options
            return self

        def partition(topic: str, number: int, offset: int) -> tuple[str, int, int]:
            return topic, number, offset

        made.__dict__.update(Consumer=consumer, TopicPartition=partition, OFFSET_BEGINNING=BEGINNING)
        return made

    def list_topics(self, topic: str, timeout: float) -> Any:
        assert timeout > 0
        return SimpleNamespace(topics={topic: SimpleNamespace(partitions=dict.fromkeys(range(3)))})

    def assign(self, partitions: Sequence[tuple[str, int, int]]) -> None:
        self._next = {number: 0 if offset == BEGINNING else offset for _, number, offset in partitions}

    def consume(self, count: int, timeout: float) -> list[Message]:
        assert timeout > 0
        found = []
        for _ in range(int(self._stream.integers(0, count + 1))):
            open_parts = [part for part, at in self._next.items() if at < len(self._rows[part])]
            if not open_parts:
                break
            if self._left is not None:
                self._left -= 1
                if self._left < 0:
                    raise KeyboardInterrupt
            part = open_parts[int(self._stream.integers(len(open_parts)))]
            at = self._next[part]
            self._next[part] += 1
            found.append(Message(row=self._rows[part][at], at=(part, at), wrong=self._wrong))
        return found

    def close(self) -> None:
        self._next = {}


def run(monkeypatch: pytest.MonkeyPatch, topic: Topic, folder: Path, messages: int) -> None:
    arguments = ["--brokers", "b", "--topic", "t", "--folder", str(folder), "--rows", "50", "--messages", str(messages)]
    monkeypatch.setitem(sys.modules, "confluent_kafka", topic.module())
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *arguments])
    space: dict[str, Any] = {"__name__": "kafka_to_files"}
    exec(compile(EXAMPLE.read_text(), str(EXAMPLE), "exec"), space)
    space["main"]()


def rows(folder: Path) -> list[dict[str, Any]]:
    index = open_index([str(folder)], ["id", "price"])
    return [row for _, piece in index.read(0, index.sample_count, ["id", "price"]) for row in piece.to_pylist()]


def test_each_message_is_in_files_once_whenever_the_program_was_stopped(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "clicks"
    with pytest.raises(KeyboardInterrupt):
        run(monkeypatch, Topic(seed, 200, broken_after=330), folder, 600)
    before = rows(folder)
    assert len(before) == 300
    assert not (folder / "_SUCCESS").exists()
    topic = Topic(seed + 1, 200)
    run(monkeypatch, topic, folder, 300)
    assert topic.given["enable.auto.commit"] is False
    assert topic.given["auto.offset.reset"] == "error"
    found = rows(folder)
    assert found[:300] == before
    assert sorted(row["id"] for row in found) == list(range(600))
    for part in range(3):
        assert [row["id"] for row in found if row["id"] % 3 == part] == list(range(part, 600, 3))
    assert (folder / "_SUCCESS").exists()
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []


def test_an_error_of_kafka_ends_the_program(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="Kafka: offset out of range"):
        run(monkeypatch, Topic(seed, 10, wrong="offset out of range"), tmp_path / "clicks", 5)
    assert not list((tmp_path / "clicks").iterdir())


def test_no_value_and_no_column_is_lost_where_messages_differ(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first message has less than later ones, and a number that later ones cut in two."""
    folder = tmp_path / "clicks"
    run(monkeypatch, Topic(seed, 40, more=lambda row: {"tag": f"tag {row}"} if row else {}), folder, 120)
    names = ["id", "price", "tag"]
    index = open_index([str(folder)], names)
    found = [row for _, piece in index.read(0, 120, names) for row in piece.to_pylist()]
    assert sorted(row["id"] for row in found) == list(range(120))
    assert all(row["tag"] == (f"tag {row['id'] // 3}" if row["id"] >= 3 else None) for row in found)
    shutil.rmtree(folder)
    with pytest.raises(DataError, match=r"column count: .*0\.5.*; allowed: values of one type .* count \(int64\)"):
        run(monkeypatch, Topic(seed, 90, more=lambda row: {"count": row if row < 60 else row + 0.5}), folder, 270)
    assert rows(folder)
