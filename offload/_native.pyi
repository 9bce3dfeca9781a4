# SPDX-License-Identifier: Apache-2.0
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Ids = tuple[NDArray[np.int32], NDArray[np.int64]]

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
        """Of every record, or 0 if they differ."""

    @property
    def size_bytes(self) -> int:
        """Of all records together."""

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
        """Sends the rows of a batch from `first` on, over a connected socket, without waiting for it.

        The next row, packets sent, and the socket's error number or 0.
        """

    def packets(self, batch_records: NDArray[np.int64], batch: int, first: int, /) -> list[bytes]:
        """The datagrams of the rows from `first` on."""

    @property
    def is_segmenting(self) -> bool:
        """Whether several datagrams go to the kernel as one (UDP_SEGMENT)."""

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
