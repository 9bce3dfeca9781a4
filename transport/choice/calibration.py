# SPDX-License-Identifier: Apache-2.0
"""The file of `sennit calibrate`: the constants of the cost model (cost_model.py) as measured on this cluster.

All ranks of a group need the same constants, because the choice of algorithms depends on them. Rendezvous compares
their labels.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sennit.transport.choice.costs import NETWORK, SHARED_MEMORY, Costs
from sennit.transport.errors import ConfigError
from sennit.transport.light_tuple import LightTuple

if TYPE_CHECKING:
    from sennit.transport.choice.coded_cost import CodecSpeed
    from sennit.transport.plans.coding import CodecKind

SCHEMA: Final = 1
# A file has a few KiB. The limit is for a wrong name.
FILE_MAX_BYTES: Final = 1 << 16
# Far more than any constant, and small enough that no product of it overflows.
VALUE_MAX: Final = 1_000.0
# A rank's record holds this much of a file's name, which is enough to recognise it.
NAME_MAX_CHARACTERS: Final = 40
DEFAULTS: Final = "defaults"
OLD_DAYS: Final = 30

REMEDY: Final = "make a new one with: sennit calibrate --output FILE"


class Calibration(LightTuple):
    """The constants for each way between ranks. Without arguments: the defaults."""

    shared_memory: Costs = SHARED_MEMORY
    network: Costs = NETWORK
    measured_codecs: Mapping[CodecKind, CodecSpeed] | None = None
    """The measured costs of codecs. They choose no algorithm, so ranks may differ in them."""
    source: str = DEFAULTS
    """The file."""
    notes: tuple[str, ...] = ()
    """Warnings that the file is old, or that it was measured on another machine."""

    @property
    def codecs(self) -> Mapping[CodecKind, CodecSpeed]:
        """All codecs: those that were not measured have the defaults."""
        from sennit.transport.choice.coded_cost import SPEEDS

        return {**SPEEDS, **(self.measured_codecs or {})}

    def digest(self) -> str:
        """Returns 8 hexadecimal digits that are equal for equal constants."""
        text = json.dumps([self.shared_memory, self.network])
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    def label(self) -> str:
        """Returns the digest and the file's name, for people and for the comparison of ranks."""
        return f"{self.digest()} {Path(self.source).name[-NAME_MAX_CHARACTERS:]}"


def read_calibration(path: str | None) -> Calibration:
    """Reads a file, or returns the defaults for None. Raises ConfigError that names the file and the field."""
    if path is None:
        return Calibration()
    try:
        if not Path(path).is_file():
            raise ConfigError(f"calibration file {path}: not a file; make one with: sennit calibrate --output {path}")
        with Path(path).open("rb") as file:
            data = file.read(FILE_MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"calibration file {path} cannot be read: {error.strerror}; {REMEDY}") from error
    if len(data) > FILE_MAX_BYTES:
        raise ConfigError(f"calibration file {path}: over {FILE_MAX_BYTES} bytes; allowed: {FILE_MAX_BYTES}")
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"calibration file {path}: not JSON: {error}; {REMEDY}") from error
    schema = _field(path, found, "", "schema")
    if schema != SCHEMA:
        raise ConfigError(f"calibration file {path}: schema {schema!r}; allowed: {SCHEMA}. Run sennit calibrate again")
    ways = _field(path, found, "", "ways")
    return Calibration(
        shared_memory=_costs(path, ways, "shared_memory"),
        network=_costs(path, ways, "network"),
        measured_codecs=_codecs(path, found),
        source=path,
        notes=tuple(_strange(path, found)),
    )


def processor_name() -> str:
    """The processor's name as the kernel tells it."""
    return _of_processor("model name", "Model")


def processor_maker() -> str:
    """Who made the processor, as the kernel tells it: "AuthenticAMD", or a number on Arm."""
    return _of_processor("vendor_id", "CPU implementer")


def _of_processor(*fields: str) -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(fields)), "")


def _strange(path: str, found: Mapping[str, Any]) -> list[str]:
    """Returns a warning if the file is old or was measured on another machine, else nothing."""
    days, age = 0, ""
    with contextlib.suppress(ValueError, TypeError):
        made = datetime.datetime.fromisoformat(str(found.get("date")))
        days = (datetime.datetime.now(datetime.UTC) - made).days
        age = f"{days} {'day' if days == 1 else 'days'} ago " if days > 0 else "today "
    told, here = [], []
    for name, own in (("host", socket.gethostname()), ("processor", processor_name())):
        theirs = found.get(name)
        if isinstance(theirs, str) and own and theirs != own:
            told.append(f"{name} {theirs:.80}")
            here.append(f"{name} {own}")
    if told:
        return [f"{path} was measured {age}on {', '.join(told)}; this is {', '.join(here)}"]
    return [f"{path} was measured {age}on this host"] if days > OLD_DAYS else []


def _field(path: str, found: object, outer: str, name: str) -> Any:
    if not isinstance(found, Mapping) or name not in found:
        raise ConfigError(f"calibration file {path}: field {outer}{name} is missing; {REMEDY}")
    return found[name]


def _costs(path: str, ways: object, way: str) -> Costs:
    return Costs(**_numbers(path, _field(path, ways, "ways.", way), f"ways.{way}.", Costs))


def _codecs(path: str, found: Mapping[str, object]) -> dict[CodecKind, CodecSpeed]:
    """Reads the costs of codecs. Files of an earlier version have none."""
    from sennit.transport.choice.coded_cost import SPEEDS, CodecSpeed

    given = found.get("codecs", {})
    if not isinstance(given, Mapping):
        raise ConfigError(f"calibration file {path}: field codecs is {given!r:.40}; allowed: an object")
    names = {kind.name.lower(): kind for kind in SPEEDS}
    if strange := sorted(set(given) - set(names)):
        raise ConfigError(
            f"calibration file {path}: field codecs.{strange[0]:.40} is unknown; allowed: {', '.join(names)}"
        )
    return {names[name]: CodecSpeed(**_numbers(path, given[name], f"codecs.{name}.", CodecSpeed)) for name in given}


def _numbers(path: str, given: object, outer: str, kind: type[Costs | CodecSpeed]) -> dict[str, float]:
    """The fields of `kind`."""
    values = {}
    for name in kind._fields:
        value = _field(path, given, outer, name)
        # A bool is an int in Python. The comparison is false for NaN.
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= VALUE_MAX:
            raise ConfigError(
                f"calibration file {path}: field {outer}{name} is {value!r:.40}; allowed: a number, 0..{VALUE_MAX:g}"
            )
        values[name] = float(value)
    return values
