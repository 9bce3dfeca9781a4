# SPDX-License-Identifier: Apache-2.0
"""A `StrEnum` whose class costs little to make.

`enum` takes 0.1 ms for a class of five members: each is a descriptor that is looked up and checked. All ranks of a host
make the classes of a group's start at the same time (docs/lab/groups.md). Such a class takes a tenth of it here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from enum import StrEnum as LightNames

    __all__ = ["LightNames"]
else:

    class _Names(type):
        """Makes a member of each text that is assigned in a class."""

        def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> _Names:
            return super().__new__(cls, name, bases, {"__slots__": (), **namespace})

        def __init__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> None:
            texts = {key: text for key, text in namespace.items() if key[0] != "_" and bases != (str,)}
            cls._members = {text: str.__new__(cls, text) for text in texts.values()}
            cls._names = {text: key for key, text in texts.items()}
            for key, text in texts.items():
                setattr(cls, key, cls._members[text])

        def __call__(cls, text: str) -> Any:
            """The member with this text. Raises ValueError if there is none."""
            member = cls._members.get(text) if isinstance(text, str) else None
            if member is None:
                raise ValueError(f"{text!r} is not a valid {cls.__qualname__}")
            return member

        def __iter__(cls) -> Iterator[Any]:
            return iter(cls._members.values())

        def __len__(cls) -> int:
            return len(cls._members)

        def __contains__(cls, text: object) -> bool:
            return isinstance(text, str) and text in cls._members

    class LightNames(str, metaclass=_Names):
        """The base of classes that are written as those of `enum.StrEnum`, and used like them."""

        @property
        def value(self) -> str:
            return str(self)

        @property
        def name(self) -> str:
            return self._names[str(self)]

        def __repr__(self) -> str:
            return f"<{type(self).__name__}.{self.name}: {str(self)!r}>"

        def __reduce__(self) -> tuple[Any, ...]:
            return type(self), (str(self),)

        def __copy__(self) -> LightNames:
            return self

        def __deepcopy__(self, memo: object) -> LightNames:
            return self
