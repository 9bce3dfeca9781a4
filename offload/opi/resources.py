# SPDX-License-Identifier: Apache-2.0
"""Resources by name, as Google's API improvement proposals have them, which OPI follows (google.aip.dev).

AIP-122: names; 132, 158: lists in pages; 133: create, with an id of the client's or a random one; 135: delete.
"""

from __future__ import annotations

import dataclasses
import re
import uuid
from collections.abc import Callable, Iterator
from typing import Any, Final, Generic, TypeVar

import grpc

from sennit.errors import SennitError

# Of a protocol buffer: the generated classes have no types.
Message = Any
Behind = TypeVar("Behind")

ID: Final = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
ID_SAID: Final = "1 to 63 lower-case letters, digits and hyphens, first a letter, last no hyphen"
PAGE, PAGE_MAX = 50, 1000
# What the client sends and the server sets itself.
SET_HERE: Final = ("name", "status")


class Refused(SennitError):
    """A request is answered with an error. `code` is gRPC's."""

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.code = code


def invalid(text: str) -> Refused:
    return Refused(grpc.StatusCode.INVALID_ARGUMENT, text)


def only(message: Message, served: set[str], where: str) -> None:
    """Refuses a message that sets a field that is not served: nobody shall believe that it had an effect."""
    for field, _ in message.ListFields():
        if field.name not in served:
            raise Refused(grpc.StatusCode.UNIMPLEMENTED, f"{where}.{field.name} is not served; leave it out")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry(Generic[Behind]):
    asked: Message
    """What the client sent."""
    shown: Message
    """What it is answered: `asked` with what the server knows."""
    behind: Behind


class Collection(Generic[Behind]):
    """The resources of one kind. `pattern`: their names, as `nvmeSubsystems/{}/nvmeNamespaces/{}`."""

    def __init__(self, pattern: str) -> None:
        self._kind = pattern.split("/")[-2]
        self._pattern = re.compile(pattern.replace("{}", "[^/]+"))
        self._example = pattern.replace("{}", "ID")
        self._entries: dict[str, Entry[Behind]] = {}

    def __iter__(self) -> Iterator[Entry[Behind]]:
        return iter(list(self._entries.values()))

    def create(
        self, parent: str, chosen: str, asked: Message, make: Callable[[str], tuple[Message, Behind]]
    ) -> Message:
        """`make` gets the name. Called again with the same id and the same fields, it returns what is there."""
        if chosen and not ID.fullmatch(chosen):
            raise invalid(f"id {chosen!r}, must be {ID_SAID}")
        name = f"{parent}{'/' if parent else ''}{self._kind}/{chosen or uuid.uuid4()}"
        asked = _plain(asked)
        if (there := self._entries.get(name)) is not None:
            if there.asked == asked:
                return there.shown
            raise Refused(grpc.StatusCode.ALREADY_EXISTS, f"{name} is there, with other fields")
        shown, behind = make(name)
        shown.name = name
        self._entries[name] = Entry(asked=asked, shown=shown, behind=behind)
        return shown

    def get(self, name: str) -> Entry[Behind]:
        if not self._pattern.fullmatch(name):
            raise invalid(f"name {name!r}, must be as {self._example}")
        if (found := self._entries.get(name)) is None:
            raise Refused(grpc.StatusCode.NOT_FOUND, f"there is no {name}")
        return found

    def below(self, parent: str) -> list[Entry[Behind]]:
        """Those of a parent, by name."""
        return [entry for name, entry in sorted(self._entries.items()) if name.startswith(f"{parent}/")]

    def page(self, size: int, after: str, parent: str = "") -> tuple[list[Message], str]:
        """At most `size` of a parent's, by name, and the token of the next page: the last name. 0: a usual page."""
        if size < 0:
            raise invalid(f"page_size {size}, must not be negative")
        if after and not self._pattern.fullmatch(after):
            raise invalid(f"page_token {after!r} is none that was given out")
        left = [entry.shown for entry in self.below(parent or self._kind) if entry.shown.name > after]
        size = min(size or PAGE, PAGE_MAX)
        return left[:size], left[size - 1].name if len(left) > size else ""

    def delete(self, name: str, allow_missing: bool, end: Callable[[Behind], None]) -> None:
        """The resource stays where `end` raises."""
        try:
            entry = self.get(name)
        except Refused as refused:
            if allow_missing and refused.code == grpc.StatusCode.NOT_FOUND:
                return
            raise
        end(entry.behind)
        del self._entries[name]


def _plain(asked: Message) -> Message:
    copy = type(asked)()
    copy.CopyFrom(asked)
    for field in SET_HERE:
        if field in copy.DESCRIPTOR.fields_by_name:
            copy.ClearField(field)
    return copy
