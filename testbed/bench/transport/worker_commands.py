# SPDX-License-Identifier: Apache-2.0
"""Commands from the conductor to a worker. They are pickled, sent over a Unix socket and answered one by one."""

from dataclasses import dataclass

from sennit.testbed.bench.cases import Case


@dataclass(frozen=True)
class Join:
    """Make the process group of `peer`."""

    peer: str


@dataclass(frozen=True)
class Verify:
    """Run the case once with different values on each rank, and check every element."""

    peer: str
    case: Case


@dataclass(frozen=True)
class Measure:
    """Run the case `iterations` times. Answers with the seconds per run."""

    peer: str
    case: Case
    iterations: int


@dataclass(frozen=True)
class Allocate:
    """Allocate, touch and keep the tensors of a case, as a user's program would."""

    case: Case


@dataclass(frozen=True)
class ResetPeak:
    """Start to watch peak memory. Answers with the resident bytes now."""


@dataclass(frozen=True)
class ReadPeak:
    """Answers with the peak of resident bytes since ResetPeak."""


@dataclass(frozen=True)
class Stop:
    """Leave all groups and end."""


Command = Join | Verify | Measure | Allocate | ResetPeak | ReadPeak | Stop


@dataclass(frozen=True)
class Failure:
    """The answer of a worker that failed. The worker ends."""

    message: str
