# SPDX-License-Identifier: Apache-2.0
"""What the conductor asks of a worker; sent pickled over a Unix socket, answered one by one."""

from dataclasses import dataclass

from sennit.testbed.bench.cases import Case


@dataclass(frozen=True)
class Join:
    """Make the process group of `peer`."""

    peer: str


@dataclass(frozen=True)
class Verify:
    """Run the case once with values that tell the ranks apart, and check every element."""

    peer: str
    case: Case


@dataclass(frozen=True)
class Measure:
    """Run the case `iterations` times; answers with the seconds one took."""

    peer: str
    case: Case
    iterations: int


@dataclass(frozen=True)
class Allocate:
    """Make and touch the tensors of a case and keep them: what the user's program would hold."""

    case: Case


@dataclass(frozen=True)
class ResetPeak:
    """Start to watch peak memory; answers with the resident bytes now."""


@dataclass(frozen=True)
class ReadPeak:
    """Answers with the peak of resident bytes since ResetPeak."""


@dataclass(frozen=True)
class Stop:
    """Leave the groups and end."""


Command = Join | Verify | Measure | Allocate | ResetPeak | ReadPeak | Stop


@dataclass(frozen=True)
class Failure:
    """The command failed; the worker ends."""

    message: str
