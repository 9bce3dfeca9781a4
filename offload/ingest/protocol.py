# SPDX-License-Identifier: Apache-2.0
"""Messages between a feeder and a rank: lines of JSON over TCP. docs/reference/ingest.md has their order.

Everything received is checked here. The code behind sees only whole messages with numbers in their range.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Final, Self

from sennit.errors import FormatError

# Incremented when messages change, or the order of samples that the terms define.
VERSION: Final = 9
# A plan and a schema of 512 fields take about a tenth of this.
LINE_MAX_BYTES: Final = 1 << 20
TEXT_MAX: Final = 1024
_UINT32_MAX: Final = (1 << 32) - 1


class ProtocolError(FormatError):
    """The other side sent something that is not a message. The text says what, and is sent back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One message, one line. `__post_init__` checks the range of every field."""

    kind: ClassVar[str]

    @classmethod
    def from_fields(cls, content: Mapping[str, Any]) -> Self:
        names = {part.name for part in fields(cls)}
        for name in names ^ content.keys():
            raise ProtocolError(f"{cls.kind}: {'unknown' if name in content else 'missing'} field {name[:TEXT_MAX]!r}")
        return cls(**content)


@dataclass(frozen=True, kw_only=True, slots=True)
class Hello(Message):
    """Feeder: introduces itself. The first message of a connection."""

    kind: ClassVar[str] = "hello"
    version: int
    feeder: str
    """A name for people."""

    def __post_init__(self) -> None:
        integer("version", self.version, 0, _UINT32_MAX)
        text("feeder", self.feeder)


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms(Message):
    """Rank: the terms of the run. From them a feeder knows the samples of every batch of every rank."""

    kind: ClassVar[str] = "terms"
    version: int
    session: int
    """What this rank's packets carry. No other rank of the run has it, so a packet that goes astray is no other's."""

    rank: int
    world_size: int
    endpoints: list[list[Any]]
    """[host, port] of each rank: TCP for these messages, UDP for records. A feeder connects to all of them."""

    packet_bytes: int
    """Bytes of the longest datagram."""

    window_packets: int
    """Datagrams of a batch that may be in flight, counted from the row that was last `taken`."""

    order: dict[str, Any]
    """What the order of samples depends on, as the trainer writes it."""

    run: int = 0
    """The number of the run, which all its ranks have."""

    elastic: bool = False
    """Whether ranks may leave and join, and have other sessions then."""

    epoch: int = 0
    """How often ranks have left or joined."""

    preprocessing: dict[str, Any] | None = None
    """What the run already knows of how samples become records, as `Facts` have it. None: a feeder fits it."""

    def __post_init__(self) -> None:
        integer("version", self.version, 0, _UINT32_MAX)
        integer("session", self.session, 0, _UINT32_MAX)
        integer("world_size", self.world_size, 1, 1 << 16)
        integer("rank", self.rank, 0, self.world_size - 1)
        integer("packet_bytes", self.packet_bytes, 64, 65_507)
        integer("window_packets", self.window_packets, 1, 1 << 16)
        if not isinstance(self.endpoints, list) or len(self.endpoints) != self.world_size:
            raise ProtocolError(f"terms: endpoints; allowed: a list of {self.world_size}")
        for endpoint in self.endpoints:
            if not isinstance(endpoint, list) or len(endpoint) != 2:
                raise ProtocolError("terms: an endpoint that is not [host, port]")
            text("host", endpoint[0])
            integer("port", endpoint[1], 1, 65_535)
        _object("order", self.order)
        integer("run", self.run, 0, _UINT32_MAX)
        if not isinstance(self.elastic, bool):
            raise ProtocolError("terms: elastic; allowed: true or false")
        integer("epoch", self.epoch, 0, _UINT32_MAX)
        if self.preprocessing is not None:
            _object("preprocessing", self.preprocessing)


@dataclass(frozen=True, kw_only=True, slots=True)
class Preparing(Message):
    """Feeder, from time to time: it reads its data, and has facts later."""

    kind: ClassVar[str] = "preparing"


@dataclass(frozen=True, kw_only=True, slots=True)
class FactsOf(Message):
    """Feeder: describes its data. `facts.Facts` reads the content."""

    kind: ClassVar[str] = "facts"
    facts: dict[str, Any]

    def __post_init__(self) -> None:
        _object("facts", self.facts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Send(Message):
    """Rank: send the batch's records from this row on. Grants credit, requests rows again, and moves batches."""

    kind: ClassVar[str] = "send"
    batch: int
    row: int

    def __post_init__(self) -> None:
        _sequence(self.batch, self.row)


@dataclass(frozen=True, kw_only=True, slots=True)
class Taken(Message):
    """Rank: the batch's rows before this one have arrived. With all of them the feeder is done with the batch."""

    kind: ClassVar[str] = "taken"
    batch: int
    row: int

    def __post_init__(self) -> None:
        _sequence(self.batch, self.row)


@dataclass(frozen=True, kw_only=True, slots=True)
class Apart(Message):
    """Rank: give packets to the kernel one by one from now on. Several in one (UDP_SEGMENT) arrive here as one."""

    kind: ClassVar[str] = "apart"


@dataclass(frozen=True, kw_only=True, slots=True)
class End(Message):
    """Rank: the run is over."""

    kind: ClassVar[str] = "end"


@dataclass(frozen=True, kw_only=True, slots=True)
class Reconfigured(Message):
    """Rank of an elastic run: ranks have left or join, so the session is over. The rank has new terms soon."""

    kind: ClassVar[str] = "reconfigured"


@dataclass(frozen=True, kw_only=True, slots=True)
class Error(Message):
    """Either side, as its last message: why it leaves."""

    kind: ClassVar[str] = "error"
    text: str

    def __post_init__(self) -> None:
        text("text", self.text)


_KINDS: Final[dict[str, type[Message]]] = {
    message.kind: message
    for message in (Hello, Terms, Preparing, FactsOf, Send, Taken, Apart, End, Reconfigured, Error)
}


def encode(message: Message) -> bytes:
    return json.dumps({"kind": message.kind, **asdict(message)}, separators=(",", ":")).encode() + b"\n"


def session_numbers(count: int) -> list[int]:
    """Random numbers of sessions for the ranks of a run. No two are equal."""
    return secrets.SystemRandom().sample(range(_UINT32_MAX + 1), count)


def error(text: str) -> Error:
    """Cuts a text to what a line may hold."""
    return Error(text=text[:TEXT_MAX] or "no reason given")


def decode(line: bytes) -> Message:
    """Parses one line without its newline."""
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):  # not UTF-8, not JSON, a number with too many digits, or nested too deeply
        raise ProtocolError("a line that is no JSON") from None
    if not isinstance(content, dict):
        raise ProtocolError("a line that is no JSON object")
    kind = content.pop("kind", None)
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ProtocolError(f"a message without a known kind; allowed: {', '.join(_KINDS)}")
    return _KINDS[kind].from_fields(content)


class LineReader:
    """Splits a byte stream into messages, however the stream is cut."""

    def __init__(self, max_bytes: int = LINE_MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._kept = bytearray()

    def feed(self, received: bytes) -> Iterator[Message]:
        """The messages that end in these bytes. Raises ProtocolError after the valid ones before the error."""
        # Only new bytes can hold the end of a line.
        searched = len(self._kept)
        self._kept += received
        while (end := self._kept.find(b"\n", searched)) >= 0:
            if end > self._max_bytes:
                break
            line = bytes(self._kept[:end])
            del self._kept[: end + 1]
            searched = 0
            yield decode(line)
        if len(self._kept) > self._max_bytes:
            raise ProtocolError(f"a line of more than {self._max_bytes} bytes")


def has_room(content: object) -> bool:
    """Whether a line has room for it beside others: half of the line."""
    return len(json.dumps(content)) <= LINE_MAX_BYTES // 2


def integer(name: str, value: Any, low: int, high: int) -> int:
    """The value. Raises ProtocolError unless it is an integer in this range."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ProtocolError(f"{name} {str(value)[:TEXT_MAX]}; allowed: integers from {low} to {high}")
    return value


def text(name: str, value: Any) -> str:
    """The value. Raises ProtocolError unless it is a text of an allowed length."""
    if not isinstance(value, str) or not 1 <= len(value) <= TEXT_MAX:
        raise ProtocolError(f"{name}; allowed: a text of 1 to {TEXT_MAX} characters")
    return value


def _object(name: str, value: Any) -> None:
    if not isinstance(value, dict):
        raise ProtocolError(f"{name}; allowed: a JSON object")


def _sequence(batch: Any, row: Any) -> None:
    integer("batch", batch, 0, _UINT32_MAX)
    integer("row", row, 0, _UINT32_MAX)
