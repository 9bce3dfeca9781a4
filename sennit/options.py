# SPDX-License-Identifier: Apache-2.0
"""Options that are written once: a field of a dataclass is an option of a command.

    batch_size: Annotated[int, Option(low=1, high=1 << 24)] = 2048
    \"\"\"Samples per step, all ranks together. A run is the same at any number of ranks.\"\"\"

is `--batch-size`, with this default and the first sentence as its help. The class calls `check` when it is made, so
that programs get the same errors as the command line. `with_options` makes the command. Typer is imported there
alone: classes with options are made by programs that have no command line (docs/decisions/0068).
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import re
import textwrap
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Annotated, Any, NamedTuple

from sennit.errors import ConfigError, SennitError
from sennit.known_names import hint


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option:
    """In the annotation of a field: how a command takes it, and what is allowed, whoever sets it.

    A value is allowed if it is None, or one of `choices`, or within the bounds that are given.
    """

    flag: str | None = None
    """None: the name of the field, as in --batch-size."""

    help: str | None = None
    """None: the first sentence of the field's docstring, and the choices."""

    metavar: str | None = None
    """What the help has for a value; None: its type."""

    parse: Callable[[str], Any] | None = None
    """Makes a value of a text; may raise ValueError. None: typer does, by the field's type."""

    text: Callable[[Any], str] = str
    """With `parse`: makes a text of the default, for the command line and its help."""

    choices: Collection[str] = ()

    low: float | None = None
    high: float | None = None
    above: float | None = None
    below: float | None = None
    """`low` and `high` themselves are allowed; `above` and `below` are not."""

    def check(self, name: str, value: Any) -> None:
        """Raises `ConfigError` unless this value is allowed. `name`: of the option, as whoever set it wrote it."""
        # Not a number (NaN) is within no bounds.
        if value is None or (
            (not self.choices or value in self.choices)
            and (self.low is None or value >= self.low)
            and (self.high is None or value <= self.high)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        ):
            return
        shown = repr(value) if isinstance(value, str) else value
        raise ConfigError(f"{name} {shown}; allowed: {self._allowed}{hint(value, self.choices)}")

    @property
    def _allowed(self) -> str:
        if self.choices:
            return ", ".join(self.choices)
        if self.low is not None and self.high is not None:
            return f"{self.low} to {self.high}"
        bounds = {"above {}": self.above, "{} or more": self.low, "below {}": self.below, "at most {}": self.high}
        return ", ".join(text.format(bound) for text, bound in bounds.items() if bound is not None)


class _Field(NamedTuple):
    """A field that is an option, or whose own fields are options."""

    name: str
    default: Any
    """`inspect.Parameter.empty`: it has none."""

    option: Option | None
    kind: Any
    """The type without annotations. Of a field without an option: the dataclass whose fields are options."""

    @property
    def flag(self) -> str:
        return (self.option.flag if self.option else None) or f"--{self.name.replace('_', '-')}"

    def value(self, given: Any) -> Any:
        """What the command line has given, as the field takes it."""
        if given is None or self.option is None:
            return given
        if self.option.parse is None:
            self.option.check(self.flag, given)
            return given
        try:
            made = self.option.parse(given)
        except SennitError:
            raise
        except ValueError as error:
            raise ConfigError(f"{self.flag}: {error}") from None
        self.option.check(self.flag, made)
        return made


@functools.cache
def _fields(kind: type) -> tuple[_Field, ...]:
    hints = typing.get_type_hints(kind, include_extras=True)
    found = []
    for field in dataclasses.fields(kind):
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        hint = hints[field.name]
        notes = getattr(hint, "__metadata__", ())
        plain = hint.__origin__ if notes else hint
        option = next((note for note in notes if isinstance(note, Option)), None)
        part = next((one for one in (plain, *typing.get_args(plain)) if dataclasses.is_dataclass(one)), None)
        if option is not None or (isinstance(part, type) and _fields(part)):
            found.append(
                _Field(
                    name=field.name,
                    default=inspect.Parameter.empty if default is dataclasses.MISSING else default,
                    option=option,
                    kind=part if option is None else plain,
                )
            )
    return tuple(found)


def check(settings: Any) -> None:
    """For `__post_init__`: raises `ConfigError` for the first field with a value that is not allowed."""
    kind: type = type(settings)
    for field in _fields(kind):
        if field.option is not None:
            field.option.check(field.name, getattr(settings, field.name))


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """`command` as typer takes it: each parameter that is a dataclass is replaced by the options of its fields.

    All its parameters are for keywords. A wrong value, and a `SennitError` of the command, end it with one line.
    """
    from sennit.command_line import fail

    own = inspect.signature(command, eval_str=True).parameters
    kinds: dict[str, type] = {
        name: one.annotation
        for name, one in own.items()
        if isinstance(one.annotation, type) and dataclasses.is_dataclass(one.annotation)
    }
    parameters = [
        parameter
        for name, one in own.items()
        for parameter in (_parameters(kinds[name]) if name in kinds else [one.replace(kind=one.KEYWORD_ONLY)])
    ]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        try:
            made = {name: _made(kind, given) for name, kind in kinds.items()}
            command(**given, **made)
        except SennitError as error:
            fail(error)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    return run


def _parameters(kind: type, *, is_optional: bool = False) -> Iterator[inspect.Parameter]:
    """The options of a dataclass for typer. `is_optional`: it may be left out, and so may each of them."""
    import typer

    texts, flags = _docstrings(kind), {field.name: field.flag for field in _fields(kind)}
    for field in _fields(kind):
        option, default = field.option, None if is_optional else field.default
        if option is None:
            yield from _parameters(field.kind, is_optional=default is None)
            continue
        taken = field.kind
        if option.parse is not None:
            taken, default = (str | None, None) if default is None else (str, option.text(default))
        shown = typer.Option(
            *([field.flag] if option.flag or taken is bool else []),
            help=option.help or _help(texts.get(field.name, ""), option.choices, flags),
            metavar=option.metavar,
        )
        yield inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[taken, shown]
        )


def _made(kind: type, given: dict[str, Any], *, is_optional: bool = False) -> Any:
    """A dataclass of what the command line has given, which is taken out of `given`. None if it was left out."""
    values = {
        field.name: _made(field.kind, given, is_optional=field.default is None)
        if field.option is None
        else field.value(given.pop(field.name))
        for field in _fields(kind)
    }
    if is_optional:
        values = {name: value for name, value in values.items() if value is not None}
        if not values:
            return None
        for field in _fields(kind):
            if field.default is inspect.Parameter.empty and field.name not in values:
                first = next(one for one in _fields(kind) if one.name in values)
                raise ConfigError(f"{first.flag} without {field.flag}; allowed: both, or neither")
    return kind(**values)


def _docstrings(kind: type) -> dict[str, str]:
    """The text below each field. Python keeps it in the source alone; where there is none, the help is shorter."""
    try:
        source = inspect.getsource(kind)
    except OSError:
        return {}
    found = {}
    (declared,) = ast.parse(textwrap.dedent(source)).body
    assert isinstance(declared, ast.ClassDef)
    for pair in itertools.pairwise(declared.body):
        match pair:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = text
    return found


def _help(docstring: str, choices: Collection[str], flags: Mapping[str, str]) -> str:
    """The first sentence, in the style of helps: without a capital (unless of an acronym) and a full stop.

    `flags`: of fields, by their names, which docstrings have in backquotes.
    """
    first = re.split(r"\.(?:\s|$)", " ".join(docstring.split()), maxsplit=1)[0]
    first = re.sub("`(.*?)`", lambda found: flags.get(found[1], found[1]), first)
    if first[1:2].islower():
        first = first[0].lower() + first[1:]
    return ": ".join([first, *([", ".join(choices)] if choices else [])])
