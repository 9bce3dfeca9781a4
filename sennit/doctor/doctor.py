# SPDX-License-Identifier: Apache-2.0
"""`sennit doctor`: what this machine can do, why it cannot do the rest, and what to do about it.

`examine` gathers, `render` prints for people, and `--json` prints the same findings for programs.
"""

import dataclasses
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from sennit import extras
from sennit.doctor.capabilities import QUESTIONS, Capability, Question, probe


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The answer to one question."""

    question: Question
    capabilities: tuple[Capability, ...]

    @property
    def ok(self) -> bool:
        return all(capability.available for capability in self.capabilities)


def examine() -> list[Finding]:
    """Runs every probe of use here. Takes a second or two."""
    return [
        Finding(question=question, capabilities=tuple(probe(name) for name in question.needs))
        for question in QUESTIONS
        if extras.from_checkout() or not question.of_tests
    ]


def healthy(findings: list[Finding]) -> bool:
    """Whether everything required is there."""
    return all(finding.ok for finding in findings if finding.question.required)


def as_json(findings: list[Finding]) -> dict[str, object]:
    """The findings as plain data, in a stable form that programs may rely on."""
    return {
        "healthy": healthy(findings),
        "questions": [
            {
                "title": finding.question.title,
                "required": finding.question.required,
                "ok": finding.ok,
                "capabilities": [dataclasses.asdict(capability) for capability in finding.capabilities],
            }
            for finding in findings
        ],
    }


def render(findings: list[Finding], console: Console) -> None:
    """One line per question, below it one line per capability, with what to do if it is missing."""
    width = max(len(name) for question in QUESTIONS for name in question.needs)
    for finding in findings:
        state = Text("ok     ", style="bold green")
        if not finding.ok:
            state = Text("missing", style="bold red" if finding.question.required else "bold yellow")
        console.print(state, Text(finding.question.title, style="bold"), soft_wrap=True)
        for capability in finding.capabilities:
            mark = Text("      ✓", style="green") if capability.available else Text("      ✗", style="yellow")
            console.print(mark, f"{capability.name:<{width}}", Text(capability.detail), soft_wrap=True)
            if capability.remedy:
                console.print(" " * 7, " " * width, Text(f"→ {capability.remedy}", style="cyan"), soft_wrap=True)
    if healthy(findings):
        console.print("\nThis machine can run sennit.", style="bold green")
    else:
        console.print("\nThis machine cannot run sennit yet: see 'missing' above.", style="bold red")
