# SPDX-License-Identifier: Apache-2.0
from collections.abc import Callable, Sequence

def instruction_sets() -> list[str]: ...
def attention_sets() -> list[str]: ...
def is_sound(
    row_counts: Sequence[int],
    bags: Sequence[int],
    lengths: tuple[int, bool],
    values: tuple[int, bool],
    value_count: int,
    /,
) -> bool: ...
def split_rows(
    lengths: tuple[int, bool],
    bags: int,
    values: tuple[int, bool],
    value_count: int,
    borders: Sequence[int],
    lengths_of_shards: int,
    values_of_shards: int,
    /,
) -> bool: ...
def split_ids(
    lengths: tuple[int, bool],
    bags: int,
    values: int,
    value_count: int,
    shards: int,
    lengths_of_shards: int,
    values_of_shards: int,
    /,
) -> bool: ...
def shards_of_ids(values: int, value_count: int, shards: int, found: int, /) -> None: ...
def counted_ids(values: int, value_count: int, ids: int, counts: int, /) -> int: ...
def initial_rows(
    ids: int, count: int, first_column: int, columns: int, seed: int, table: int, bound: float, rows: int, /
) -> None: ...
def distinct(values: tuple[int, bool], value_count: int, ids: int, places: int, /) -> int: ...

class IdDirectory:
    def __init__(self, entries: int, row_count: int, /) -> None: ...
    @property
    def used(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...
    def find(self, ids: int, count: int, rows: int, step: int, once: bool, before: int, /) -> int: ...
    def undo(self, rows: int, count: int, before: int, /) -> None: ...
    def admit(self, ids: int, count: int, counts: int, step: int, rows: int, /) -> None: ...
    def victims(self, count: int, policy: int, step: int, keys: int, /) -> list[int]: ...
    def evict(self, rows: int, count: int, /) -> None: ...

class Operator:
    def __init__(self, instruction_set: str, optimizer: int, threads: int, /) -> None: ...
    def add(
        self,
        weight: int,
        row_count: int,
        dim: int,
        precision: int,
        first_row: int,
        stream: int,
        state1: int,
        state2: int,
        row_numbers: int,
        /,
    ) -> None: ...
    def lookup(
        self,
        tables: Sequence[int],
        bags: Sequence[int],
        lengths: tuple[int, bool],
        values: tuple[int, bool],
        weights: int,
        pooling: int,
        output: int,
        /,
    ) -> None: ...
    def weight_gradient(
        self,
        tables: Sequence[int],
        bags: Sequence[int],
        lengths: tuple[int, bool],
        values: tuple[int, bool],
        weights: int,
        pooling: int,
        gradient: int,
        result: int,
        /,
    ) -> None: ...
    def update(
        self,
        tables: Sequence[int],
        bags: Sequence[int],
        lengths: tuple[int, bool],
        values: tuple[int, bool],
        weights: int,
        pooling: int,
        slices: Sequence[int],
        gradient: int,
        constants: Sequence[float],
        decay_after: bool,
        nesterov: bool,
        is_stochastic: bool,
        step: int,
        seed: int,
        /,
    ) -> list[tuple[int, int, int]]: ...
    def sum_rows(
        self,
        tables: Sequence[int],
        bags: Sequence[int],
        lengths: tuple[int, bool],
        values: tuple[int, bool],
        weights: int,
        pooling: int,
        slices: Sequence[int],
        gradient: int,
        make_room: Callable[[int, int], tuple[int, int]],
        /,
    ) -> None: ...
    @property
    def instruction_set(self) -> str: ...
    @property
    def scratch_bytes(self) -> int: ...

class Products:
    def __init__(self, instruction_set: str, /) -> None: ...
    def runs_of(
        self, keys: int, members: int, key_count: int, distinct: int, order: int, starts: int, places: int, /
    ) -> int: ...
    def fold_products(
        self,
        left: tuple[int, int, int, int, int],
        right: tuple[int, int, int, int, int],
        starts: int,
        items: int,
        rows: int,
        depth: int,
        columns: int,
        result: int,
        /,
    ) -> None: ...

class Attention:
    def __init__(
        self,
        instruction_set: str,
        query: tuple[int, int, int, int],
        key: tuple[int, int, int, int],
        value: tuple[int, int, int, int],
        offsets: int,
        targets: int,
        sequences: int,
        heads: int,
        context: int,
        scale: float,
        share: float,
        is_softmax: bool,
        is_causal: bool,
        is_bf16: bool,
        window: int,
        position_bias: tuple[int, int],
        time_bias: tuple[int, int],
        times: int,
        boundaries: int,
        /,
    ) -> None: ...
    def attend(self, output: tuple[int, int, int, int], statistics: int, threads: int, /) -> None: ...
    def differentiate(
        self,
        output: tuple[int, int, int, int],
        statistics: int,
        query: tuple[int, int, int, int],
        key: tuple[int, int, int, int],
        value: tuple[int, int, int, int],
        bias: int,
        threads: int,
        /,
    ) -> None: ...
