# SPDX-License-Identifier: Apache-2.0
"""Compares measures with goals: a case has passed, failed, or could not run here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from sennit.testbed.scenarios.model import Goal


class Status(StrEnum):
    """The outcome of a case."""

    PASSED = "passed"
    FAILED = "failed"
    UNSUPPORTED = "unsupported"


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A goal with the measured value."""

    goal: Goal
    value: float | None
    """None: the run gave no such measure."""

    @property
    def met(self) -> bool:
        return self.goal.met_by(self.value)

    def word(self, *, strict: bool) -> str:
        if self.met:
            return "met"
        return "failed" if self.goal.must or strict else "short"


def judge(goals: Sequence[Goal], measures: Mapping[str, float]) -> list[Judged]:
    return [Judged(goal=goal, value=measures.get(goal.measure)) for goal in goals]


def status_of(judged: Sequence[Judged], *, strict: bool) -> Status:
    """Failed if a goal of correctness or bounded time is missed, or with `strict` any goal."""
    missed = any(not one.met and (one.goal.must or strict) for one in judged)
    return Status.FAILED if missed else Status.PASSED
