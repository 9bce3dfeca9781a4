# SPDX-License-Identifier: Apache-2.0
"""A topic of Kafka as files that a run follows. Each message is a row, as JSON.

    python examples/kafka_to_files.py --brokers localhost:9092 --topic clicks --folder clicks
    sennit train --data clicks --schema clicks.toml --order files --follow ...   # at the same time

Kafka gives messages of several partitions in an order that no second reader gets. A file keeps the order of the first
time. So a run is the same at any number of ranks, and when it is stopped and resumed.

A file has in its metadata from which offsets its messages are, and is renamed when it is whole. So this program goes on
behind the last file whenever it was stopped, and has each message once: nothing is committed to Kafka. A checkpoint of
the run names its files (`files.json`), and thereby the offsets up to which the model was trained.

A column has one type in all files, that of its first values: `1` in the first file and `1.5` in a later one end the
program, and no message is lost. A message without a column has null there.

It takes `pip install confluent-kafka`.
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc

from sennit.runtime.stream.spooling import table_of

OFFSETS = b"kafka"
"""The key of the metadata: JSON of partition to the offset that comes next."""


def next_offsets(folder: Path) -> dict[int, int]:
    """By partition, the offset behind the messages that are in files; empty if there are none."""
    files = sorted(folder.glob("part-*.arrow"))
    if not files:
        return {}
    with pa.OSFile(str(files[-1])) as file:
        found = json.loads(pa.ipc.open_file(file).schema.metadata[OFFSETS])
    return {int(partition): offset for partition, offset in found.items()}


def batches(consumer: Any, rows: int, wait_s: float, count: int | None) -> Iterator[list[Any]]:
    """Messages, so many at a time, or as many as came within `wait_s` of the first one; `count` in all, or for ever."""
    left = count
    while left is None or left:
        wanted, found, began_s = rows if left is None else min(rows, left), list[Any](), time.monotonic()
        while not found or (len(found) < wanted and time.monotonic() - began_s < wait_s):
            for message in consumer.consume(wanted - len(found), timeout=1.0):
                if message.error():
                    raise SystemExit(f"Kafka: {message.error()}")
                began_s = began_s if found else time.monotonic()
                found.append(message)
        yield found
        left = None if left is None else left - len(found)


def write(messages: list[Any], folder: Path, number: int, offsets: dict[int, int], schema: pa.Schema | None) -> Any:
    """Writes a file and counts its messages in `offsets`. Returns its columns: those of `schema`, with their types, and
    further ones of these messages. Raises DataError for values that are not of their column's type.
    """
    table = table_of([json.loads(message.value()) for message in messages], schema)
    for message in messages:
        offsets[message.partition()] = message.offset() + 1
    marked = table.replace_schema_metadata({OFFSETS: json.dumps(offsets)}).combine_chunks()
    partial = folder / f".part-{number:08}.arrow"  # a name with a dot is no data to anyone
    with pa.OSFile(str(partial), "wb") as file, pa.ipc.new_file(file, marked.schema) as writer:
        writer.write_table(marked)
    partial.rename(folder / f"part-{number:08}.arrow")
    return table.schema


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--brokers", required=True)
    options.add_argument("--topic", required=True)
    options.add_argument("--folder", type=Path, required=True)
    options.add_argument("--rows", type=int, default=16_384, help="of a file")
    options.add_argument("--wait", type=float, default=60.0, help="seconds until a file is written with fewer rows")
    options.add_argument("--messages", type=int, help="end after so many, and mark the folder as complete")
    given = options.parse_args()

    from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition

    given.folder.mkdir(parents=True, exist_ok=True)
    offsets = next_offsets(given.folder)
    consumer = Consumer(
        {
            "bootstrap.servers": given.brokers,
            # A consumer has a group, though nothing is committed in it: offsets are in the files.
            "group.id": f"sennit-{given.topic}",
            "enable.auto.commit": False,
            # Messages that Kafka has deleted before they were read are not passed over in silence.
            "auto.offset.reset": "error",
        }
    )
    partitions = consumer.list_topics(given.topic, timeout=10.0).topics[given.topic].partitions
    consumer.assign(
        [TopicPartition(given.topic, one, offsets.get(one, OFFSET_BEGINNING)) for one in sorted(partitions)]
    )
    number, schema = len(list(given.folder.glob("part-*.arrow"))), None
    if number:
        with pa.OSFile(str(given.folder / f"part-{number - 1:08}.arrow")) as file:
            schema = pa.ipc.open_file(file).schema.remove_metadata()
    try:
        for messages in batches(consumer, given.rows, given.wait, given.messages):
            schema = write(messages, given.folder, number, offsets, schema)
            number += 1
            print(f"file {number}: {len(messages)} messages, next offsets {offsets}")
    finally:
        consumer.close()
    (given.folder / "_SUCCESS").touch()


if __name__ == "__main__":
    main()
