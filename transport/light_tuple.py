# SPDX-License-Identifier: Apache-2.0
"""A `NamedTuple` whose class is made without the compiler.

`typing.NamedTuple` compiles a constructor for each class, and each annotation on top: 0.3 to 0.5 ms for one of eight
fields. All ranks of a host make the classes of a group's start at the same time. Such a class takes 0.02 ms here, and
an instance 0.7 µs in place of 0.5 (docs/lab/groups.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from typing import Any, ClassVar, Self, dataclass_transform


class _Fields(type):
    """Makes each annotation of a class a field of its tuples. What is assigned there is the default."""

    def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> _Fields:
        # A class behind one with fields has these, too.
        inherited: tuple[str, ...] = getattr(bases[0], "_fields", ())
        added = tuple(namespace.get("__annotations__", ())) if bases != (tuple,) else ()
        defaults = {field: namespace[field] for field in added if field in namespace}
        namespace["_field_defaults"] = {**getattr(bases[0], "_field_defaults", {}), **defaults}
        fields = (*inherited, *added)
        namespace |= {field: property(itemgetter(index)) for index, field in enumerate(fields) if field in added}
        namespace |= {"_fields": fields, "__match_args__": fields, "__slots__": ()}
        return super().__new__(cls, name, bases, namespace)


@dataclass_transform(frozen_default=True)
class LightTuple(tuple[Any, ...], metaclass=_Fields):
    """The base of classes that are written as those of `typing.NamedTuple`, and used like them."""

    _fields: ClassVar[tuple[str, ...]]
    _field_defaults: ClassVar[Mapping[str, Any]]

    def __new__(cls, *given: Any, **named: Any) -> Self:
        """Raises TypeError if a field has no value, or two, and for names that are no field."""
        left = cls._fields[len(given) :]
        if left or named:
            values = {**cls._field_defaults, **named}
            if lacking := [field for field in left if field not in values]:
                raise TypeError(f"{cls.__name__} without {', '.join(lacking)}; allowed: a value for each field")
            if strange := [name for name in named if name not in left]:
                raise TypeError(f"{cls.__name__} with {', '.join(strange)}; allowed: {', '.join(left) or 'no more'}")
            given = (*given, *[values[field] for field in left])
        if len(given) != len(cls._fields):
            raise TypeError(f"{cls.__name__} of {len(given)} values; allowed: at most {len(cls._fields)}")
        return super().__new__(cls, given)

    def __getnewargs__(self) -> tuple[Any, ...]:
        return tuple(self)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self._asdict().items())})"

    def _asdict(self) -> dict[str, Any]:
        return dict(zip(self._fields, self, strict=True))

    def _replace(self, **changes: Any) -> Self:
        return type(self)(**{**self._asdict(), **changes})
