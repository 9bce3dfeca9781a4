# SPDX-License-Identifier: Apache-2.0
"""The options of a run whose files become more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from sennit.options import Option, check
from sennit.runtime.stream.times import duration_text, parse_duration
from sennit.transport.errors import ConfigError


def _duration(text: str) -> float:
    return parse_duration(text)


@dataclass(frozen=True, kw_only=True, slots=True)
class FollowSettings:
    """How a run knows that there will be no more files. Without `done_file` and `done_after_s` it never does."""

    follow: Annotated[bool, Option()]
    """With --order time or files: train on files that come into the folder of --data, too, in the order of names."""

    done_file: Annotated[str | None, Option(metavar="NAME")] = None
    """With --follow: a file of this name in the folder says that it is complete."""

    done_after_s: Annotated[
        float | None, Option(flag="--done-after", metavar="DURATION", parse=_duration, text=duration_text, above=0)
    ] = None
    """With --follow: the folder is complete when the run waits, and no file has come or grown for so long."""

    def __post_init__(self) -> None:
        check(self)
        if not self.follow:
            raise ConfigError("follow False; allowed: True, or no FollowSettings")
        if self.done_file is not None and ("/" in self.done_file or not self.done_file):
            raise ConfigError(f"--done-file {self.done_file!r}; allowed: the name of a file in the folder")
