# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint says about the run that wrote it, as JSON beside the weights.

Weights alone are dangerous: with another split, they have been trained on rows held back for evaluation. So a run
resumes from a checkpoint only if everything that decides the meaning of its weights is equal.
docs/reference/checkpoints.md lists the fields.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

import torch

import sennit
from sennit.transport.choice.calibration import processor_name
from sennit.transport.errors import ConfigError, SennitError

NAME: Final = "manifest.json"
FORMAT: Final = 2
MAX_BYTES: Final = 64 << 20
"""Larger files are refused. A manifest has one line for each table and feature."""

_RUN_ID: Final = re.compile(r"[0-9a-f]{16}")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_FILE: Final = re.compile(r"(?!\.{1,2}$)[\w.-]+", re.ASCII)
_MAX_DEPTH: Final = 8
_SHOWN_LINES: Final = 12
_SHOWN_CHARACTERS: Final = 80


class CheckpointError(SennitError):
    """A checkpoint could not be written or read. The message names the folder and the reason."""


@dataclass(frozen=True, slots=True)
class Link:
    """A checkpoint that an incremental one needs."""

    step: int
    sha256: str
    """SHA-256 of its manifest. The manifest has those of its files."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The run that a checkpoint belongs to, and what its files hold."""

    run_id: str
    """16 hexadecimal digits, drawn when the run began. A resumed run keeps them."""

    step: int
    """Steps done."""

    fixed: Mapping[str, Any]
    """JSON: settings that a resumed run must share (data, order of samples, model, optimizer)."""

    free: Mapping[str, Any]
    """JSON: settings that a resumed run may change (number of ranks, epochs, learning rates, ...)."""

    code: Mapping[str, Any]
    """Versions of the software that wrote the checkpoint, its processor and its threads."""

    after: tuple[Link, ...] = ()
    """The base of an incremental checkpoint, and those between, in order. Empty: it needs no other."""

    files: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of the other files, by name."""

    tensors: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of the bytes of whole tensors as they were when they were saved, by name."""

    def text(self) -> str:
        """The manifest as the text of its file."""
        return json.dumps({**self._content(), "sha256": self.sha256}, indent=2, allow_nan=False) + "\n"

    @property
    def sha256(self) -> str:
        """SHA-256 over all fields."""
        return _digest(self._content())

    def _content(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "run": {"id": self.run_id, "step": self.step},
            "code": self.code,
            "fixed": self.fixed,
            "free": self.free,
            "saved": {
                "after": [{"step": link.step, "sha256": link.sha256} for link in self.after],
                "files": self.files,
                "tensors": self.tensors,
            },
        }

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses what `text` wrote. Raises ValueError for anything else."""
        try:
            content = json.loads(text, parse_constant=_refuse_constant)
        except RecursionError:
            raise ValueError("nested too deeply") from None
        if not isinstance(content, dict):
            raise ValueError("not an object")
        _check_depth(content)
        if content.get("format") != FORMAT:
            raise ValueError(f"format {_shown(content.get('format'))}; allowed: {FORMAT}")
        run = _object(content, "run")
        run_id = run.get("id")
        if not isinstance(run_id, str) or not _RUN_ID.fullmatch(run_id):
            raise ValueError(f"run.id {_shown(run_id)}; allowed: 16 hexadecimal digits")
        step = _step("run.step", run.get("step"))
        fixed, free, code, saved = (_object(content, name) for name in ("fixed", "free", "code", "saved"))
        files, tensors = _object(saved, "files"), _object(saved, "tensors")
        for name in files:
            if not _FILE.fullmatch(name):
                raise ValueError(f"file {_shown(name)}; allowed: letters, digits, '_', '.', '-'")
        for name, digest in (*files.items(), *tensors.items()):
            _check_sha256(name, digest)
        after = tuple(_links(saved.get("after")))
        given = content.pop("sha256", None)
        _check_sha256("the manifest", given)
        if given != _digest(content):
            raise ValueError("its content does not have the SHA-256 that it names: it is damaged")
        return cls(
            run_id=run_id, step=step, fixed=fixed, free=free, code=code, after=after, files=files, tensors=tensors
        )

    @classmethod
    def read(cls, checkpoint: Path) -> Self:
        """Reads the manifest of a checkpoint. Raises `CheckpointError`, also if there is none."""
        path = checkpoint / NAME
        try:
            with path.open("rb") as file:
                content = file.read(MAX_BYTES + 1)
            if len(content) > MAX_BYTES:
                raise ValueError(f"more than {MAX_BYTES} bytes")
            return cls.parse(content.decode())
        except FileNotFoundError:
            raise CheckpointError(
                f"{checkpoint} has no {NAME}, so nothing shows which data it has seen: it is older than manifests, "
                "or a part of it was lost. Finish that run with the version that wrote it, or begin a new run in "
                "another folder"
            ) from None
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error


def _links(content: Any) -> Iterator[Link]:
    if not isinstance(content, list):
        raise ValueError(f"saved.after {_shown(content)}; allowed: a list")
    for link in content:
        if not isinstance(link, dict):
            raise ValueError(f"saved.after has {_shown(link)}; allowed: objects")
        step = _step("saved.after.step", link.get("step"))
        _check_sha256("saved.after", link.get("sha256"))
        yield Link(step, link["sha256"])


def _step(what: str, step: Any) -> int:
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 1 << 63:
        raise ValueError(f"{what} {_shown(step)}; allowed: an integer from 0")
    return step


def _check_sha256(what: str, digest: Any) -> None:
    if not isinstance(digest, str) or not _SHA256.fullmatch(digest):
        raise ValueError(f"SHA-256 of {_shown(what)}: {_shown(digest)}; allowed: 64 hexadecimal digits")


def _digest(content: Any) -> str:
    """SHA-256 of JSON. Layout and order of fields do not change it."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def new_run_id() -> str:
    return secrets.token_hex(8)


def code_versions() -> dict[str, str]:
    """The software and the processor by which weights are rounded as they are."""
    return {
        "sennit": sennit.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": processor_name() or platform.machine(),
        "threads": str(torch.get_num_threads()),
    }


def differences(
    theirs: Mapping[str, Any], ours: Mapping[str, Any], where: tuple[str, str] = ("in the checkpoint", "here")
) -> list[str]:
    """One line for each leaf in which two JSON objects differ, in the order of `ours`."""
    left, right = dict(_leaves(theirs)), dict(_leaves(ours))
    names = [*right, *(name for name in left if name not in right)]
    return [
        f"{name}: {_shown_in(left, name)} {where[0]}, {_shown_in(right, name)} {where[1]}"
        for name in names
        if name not in left or name not in right or left[name] != right[name]
    ]


def check_same_run(checkpoint: Path, theirs: Manifest, fixed: Mapping[str, Any]) -> None:
    """Raises `ConfigError` that lists how the checkpoint's run differs from this one."""
    # A round trip through JSON leaves only values that JSON can hold.
    lines = differences(theirs.fixed, json.loads(json.dumps(fixed)))
    if not lines:
        return
    shown = lines[:_SHOWN_LINES]
    if len(lines) > len(shown):
        shown.append(f"and {len(lines) - len(shown)} more")
    raise ConfigError(
        f"{checkpoint} is of another run; resume with its settings, or begin a new run in another folder:\n  "
        + "\n  ".join(shown)
    )


def _leaves(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in content.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _shown_in(leaves: Mapping[str, Any], name: str) -> str:
    return _shown(leaves[name]) if name in leaves else "absent"


def _shown(value: Any) -> str:
    """A value as JSON, which escapes characters that could control a terminal."""
    text = json.dumps(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def _object(content: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = content.get(name)
    if not isinstance(value, dict):
        raise ValueError(f"{name} {_shown(value)}; allowed: an object")
    return value


def _check_depth(content: Any) -> None:
    """Refuses deep nesting, so that recursive functions cannot reach the interpreter's limit."""
    level = [content]
    for _ in range(_MAX_DEPTH):
        level = [
            inner
            for value in level
            for inner in (value.values() if isinstance(value, dict) else value)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    raise ValueError("nested too deeply")


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"number {name}; allowed: finite numbers")
