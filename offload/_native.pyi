# SPDX-License-Identifier: Apache-2.0
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Ids = tuple[NDArray[np.int32], NDArray[np.int64]]

def permute(size: int, keys: Sequence[int], places: NDArray[np.int64]) -> None:
    """Replaces each of `places` by its image under a keyed bijection on [0, size)."""

Capsules = tuple[object, object]
"""What `__arrow_c_array__` of a column gives."""

class Vocabulary:
    """Value i of a column of int64, uint64 or large_string has row i + 1, every other value row 0."""

    def __init__(self, values: Capsules, /) -> None: ...

class NumberEncoder:
    """(f(x) - mean) / deviation of float32 numbers, where f clamps first and then looks up a table. Null gives 0."""

    def __init__(
        self, clamp: tuple[float, float] | None, table: NDArray[np.uint32] | None, mean: float, deviation: float
    ) -> None: ...

class IdEncoder:
    """Ids as rows of a table: as they are, hashed if there is a salt, or by a vocabulary.

    `hashes`: False if somebody else hashes the ids, which are then int64.
    """

    def __init__(
        self, rows: int, first: int | None, salt: int | None, vocabulary: Vocabulary | None, hashes: bool = True
    ) -> None: ...

TableIds = tuple[NDArray[np.int32] | NDArray[np.int64], NDArray[np.int64] | None]
"""Rows, and the offsets of samples unless each has one row."""

class BatchEncoder:
    def __init__(self, numbers: Sequence[NumberEncoder], ids: Sequence[IdEncoder], /) -> None: ...
    def encode(
        self,
        batch: Capsules,
        number_places: Sequence[int],
        id_places: Sequence[int],
        label_places: Sequence[int],
        weight_place: int | None,
        /,
    ) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32] | None, list[TableIds]] | None:
        """Dense numbers [rows, numbers], labels [rows] or [rows, labels], weights [rows], and the ids of all tables.

        The places say which column is for which encoder, and which ones are labels and weights. None: a value is not
        allowed, or a column is not for its encoder.
        """

class SamplesInMemory:
    def __init__(self, dense: NDArray[np.float32], columns: list[TableIds], /) -> None: ...
    def gather(self, rows: NDArray[np.int64], /) -> tuple[NDArray[np.float32], NDArray[np.int32], NDArray[np.int64]]:
        """Dense numbers, lengths [tables, rows] and ids of these samples. IndexError for rows outside [0, samples)."""

def text_ids(texts: Capsules, /) -> NDArray[np.int64]: ...
def content_hash(content: bytes, /) -> int: ...

class Program:
    def __init__(self) -> None: ...
    def dense_source(self) -> int: ...
    def ids_source(self) -> int: ...
    def clamp(self, x: int, low: float, high: float, /) -> int: ...
    def look_up(self, x: int, bits: int, table: Sequence[int], /) -> int: ...
    def bucketize(self, x: int, borders: Sequence[float], /) -> int: ...
    def sigrid_hash(self, ids: int, salt: int, max_value: int, /) -> int: ...
    def positive_modulus(self, ids: int, divisor: int, /) -> int: ...
    def clamp_list(self, ids: int, low: int, high: int, /) -> int: ...
    def map_id(
        self,
        ids: int,
        multiplier: int,
        shift: int,
        probes: int,
        keys: Sequence[int],
        values: Sequence[int],
        absent: int,
        /,
    ) -> int: ...
    def enumerate(self, ids: int, /) -> int: ...
    def first_x(self, ids: int, count: int, /) -> int: ...
    def ngram(self, ids: int, count: int, /) -> int: ...
    def cross(self, left: int, right: int, /) -> int: ...
    def run(
        self, sources: list[NDArray[np.float32] | Ids], outputs: Sequence[int], /
    ) -> list[NDArray[np.float32] | Ids]: ...

def packet_checksum(packet: bytes | bytearray | memoryview) -> int:
    """XXH64 of a packet of records with zeros in place of its checksum. ValueError if it has no whole header."""

class RecordColumns:
    """Columns of a data set, to be encoded. Nothing is copied; the arrays must not change meanwhile."""

    def __init__(
        self,
        is_big_endian: bool,
        labels: NDArray[np.float32],
        is_binary: bool,
        dense: NDArray[np.float32],
        is_bfloat16: Sequence[bool],
        /,
    ) -> None: ...
    def add_ids(self, values: NDArray[np.int32] | NDArray[np.int64], width_bytes: int, length: int, /) -> None: ...
    def add_list(
        self,
        values: NDArray[np.int32] | NDArray[np.int64],
        offsets: NDArray[np.int64],
        width_bytes: int,
        length_bytes: int,
        /,
    ) -> None: ...
    @property
    def record_bytes(self) -> int:
        """Bytes of each record, or 0 if they differ."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all records together."""

    def encode(self, out: NDArray[np.uint8], starts: NDArray[np.uint64] | None, /) -> None: ...

class RecordSender:
    """Packs encoded records into datagrams and sends them. Nothing is copied before that."""

    def __init__(
        self,
        records: NDArray[np.uint8],
        starts: NDArray[np.uint64] | None,
        record_bytes: int,
        schema_id: int,
        session: int,
        body_max_bytes: int,
        /,
    ) -> None: ...
    def send(
        self, fd: int, batch_records: NDArray[np.int64], batch: int, first: int, packets_max: int, /
    ) -> tuple[int, int, int]:
        """Sends the rows of a batch from `first` on, over a connected socket. Never blocks.

        Returns the next row, packets sent, and the socket's error number or 0.
        """

    def packets(self, batch_records: NDArray[np.int64], batch: int, first: int, /) -> list[bytes]:
        """Returns the datagrams of the rows from `first` on."""

    def send_apart(self) -> None:
        """Passes each datagram to the kernel alone from now on: several in one message reach some receivers as one."""

    @property
    def is_segmenting(self) -> bool:
        """Whether the kernel gets several datagrams as one message (UDP_SEGMENT)."""

def trace_batch_begun(rank: int, batch: int) -> None: ...
def trace_batch_complete(rank: int, batch: int, rows: int) -> None: ...
def trace_batch_wanted(rank: int, batch: int) -> None: ...
def trace_batch_taken(rank: int, batch: int) -> None: ...
def trace_batch_released(rank: int, batch: int) -> None: ...
def trace_rows_requested(rank: int, batch: int, row: int, why: int) -> None: ...

class DenseField:
    def __init__(self, is_bfloat16: bool, is_wanted: bool) -> None: ...

class IdsField:
    def __init__(self, width_bytes: int, is_signed: bool, length: int, is_list: bool, is_wanted: bool) -> None: ...

class RecordSchema:
    def __init__(
        self, is_big_endian: bool, is_label_float: bool, dense: Sequence[DenseField], ids: Sequence[IdsField]
    ) -> None: ...

class RowFilters:
    def __init__(self) -> None: ...
    def sample(self, seed: int, below: int, /) -> None: ...
    def keep_range(self, dense: int, low: float, high: float, /) -> None: ...
    def keep_length(self, ids: int, least: int, most: int, /) -> None: ...

class Receiver:
    def __init__(
        self,
        schema: RecordSchema,
        filters: RowFilters,
        *,
        schema_id: int,
        session: int,
        batch_rows: int,
        slots: int,
    ) -> None: ...
    def deliver(self, datagram: bytes, /) -> None: ...
    def rows_taken(self, batch: int, /) -> int: ...
    def row_ahead(self, batch: int, /) -> int: ...
    def release(self, batch: int, /) -> None: ...
    def counters(self) -> tuple[list[int], int, int, int]: ...
    def batch(
        self, number: int, program: Program, dense: Sequence[int], sparse: Sequence[int], /
    ) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.int32], list[NDArray[np.int64]]]: ...
    def count_ids(
        self, batch: int, program: Program, sparse: Sequence[int], sample_shift: int, counts: NDArray[np.uint64], /
    ) -> int: ...

class SocketReader:
    def __init__(self, receiver: Receiver, address: str, port: int, receive_buffer_bytes: int) -> None: ...
    @property
    def port(self) -> int: ...
    @property
    def receive_buffer_bytes(self) -> int: ...
    @property
    def kernel_drops(self) -> int: ...
    def check(self) -> None: ...
    def stop(self, timeout_ms: int) -> None: ...

class KernelSlots:
    """The slots of a ring that BPF programs fill (ebpf/include/feed_slot.h). Whoever claims a slot owns its content."""

    def __init__(self, memory: NDArray[np.uint8], slots: int, slot_bytes: int) -> None: ...
    def rows_taken(self, batch: int, /) -> int:
        """The next row expected of the batch; 0 if its slot has another one. What is before it may be read."""

    def row_ahead(self, batch: int, /) -> int: ...
    def claim(self, batch: int, timeout_ms: int) -> int:
        """Claims the batch's slot, whatever it has, and returns the state to give back. OSError (ETIMEDOUT) if a
        processor does not leave it.
        """

    def rows_kept(self, batch: int, /) -> int: ...
    def give_back(self, batch: int, state: int, /) -> None: ...
    def open(self, batch: int, /) -> None:
        """Gives the claimed slot to the batch."""

class ParsedLines:
    """A record batch of Arrow."""

    def __arrow_c_array__(self, requested_schema: object = None) -> Capsules: ...

class LineParser:
    """`columns`: the place in a line and the format of each, as the Arrow C data interface writes types."""

    def __init__(
        self, *, delimiter: str, nulls: Sequence[str], names: Sequence[str], columns: Sequence[tuple[int, str]]
    ) -> None: ...
    def parse(self, text: bytes, line_count: int, /) -> ParsedLines | None:
        """None unless the text is so many plain lines."""
