# SPDX-License-Identifier: Apache-2.0
"""The HTML report: one file that links only to its own logs and captures. The table comes first, then plots."""

from __future__ import annotations

import json
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any, Final

from sennit.testbed.scenarios import measures, plots
from sennit.testbed.scenarios.results import Case, Results, Status, digest_table
from sennit.transport.sizes import format_size

STYLE: Final = Path(__file__).with_name("page.css")
GIGA: Final = 1e9
# Goals of every case: all results arrived and were correct.
EXACT: Final = ("results", "wrong_results", "failed_ranks", "distinct_digests", "trainings", "failed_trainings")


def write(outcome: Results, path: Path) -> None:
    path.write_text(render(outcome), encoding="utf-8")


def render(outcome: Results) -> str:
    """The whole page."""
    parts = [
        _head(outcome),
        _table(outcome.cases),
        _figures(outcome),
        _glossary(outcome.cases),
        _details(outcome.cases),
    ]
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>sennit testbed</title>\n<style>\n{STYLE.read_text(encoding='utf-8')}</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def _head(outcome: Results) -> str:
    machine = outcome.machine
    counts = ", ".join(
        f'<span class="{status}">{outcome.count(status)} {status}</span>' for status in Status if outcome.count(status)
    )
    short = sum(_short_goals(case) > 0 for case in outcome.cases if case.status == Status.PASSED)
    if short:
        counts += f' (<span class="short">{short} short of a goal about speed</span>)'
    versions = machine.get("versions")
    facts = [
        f"{outcome.form} form",
        f"seed {outcome.seed}",
        f"{machine['processor']}, {machine['cores']} cores",
        f"Linux {machine['kernel']}",
        ", ".join(f"{name} {version}" for name, version in versions.items()) if isinstance(versions, dict) else "",
        "load at the start " + " ".join(f"{load:.1f}" for load in _floats(machine["load_average"])),
        str(machine["time_utc"]),
    ]
    note = (
        "Goals of correctness and bounded time decide whether a case passes."
        + (" Goals about speed do as well (--strict)." if outcome.strict else
           " Goals about speed are met or <span class='short'>short</span> beside them: a busy machine fails no case.")
        + (" This is the short form: its figures show that everything runs, not how fast." if outcome.form == "short"
           else "")
    )  # fmt: skip
    return (
        f"<h1>sennit testbed: {counts or 'no case'}</h1>\n"
        f'<p class="soft">{escape(" · ".join(fact for fact in facts if fact))}</p>\n<p>{note}</p>'
    )


def _floats(value: object) -> Iterable[float]:
    return value if isinstance(value, list) else []


def _short_goals(case: Case) -> int:
    return sum(goal["word"] == "short" for goal in case.goals)


def _table(cases: list[Case]) -> str:
    rows = []
    for case in cases:
        goals = "".join(f"<li>{text}</li>" for text in _goals(case.goals))
        reason = f'<div class="{case.status}">{escape(case.reason)}</div>' if case.reason else ""
        rows.append(
            f'<tr><td class="name"><a href="#{escape(case.name)}">{escape(case.name)}</a></td>'
            f'<td class="{case.status}">{case.status}{_shortfall(case)}</td>'
            f'<td>{escape(case.title)}<div class="soft">{escape(conditions(case))}</div>{reason}</td>'
            f'<td><ul class="goals">{goals}</ul></td><td class="number">{case.seconds:.1f}</td></tr>'
        )
    return (
        '<div class="wide"><table class="cases">\n<thead><tr><th>case</th><th>outcome</th><th>what happens</th>'
        '<th>measured, goal</th><th class="number">seconds</th></tr></thead>\n<tbody>\n'
        + "\n".join(rows)
        + "\n</tbody></table></div>"
    )


def _shortfall(case: Case) -> str:
    count = _short_goals(case)
    return f'<div class="short">{count} goal{"" if count == 1 else "s"} short</div>' if count else ""


def conditions(case: Case) -> str:
    """Size, ranks, planes, packet segmentation and impairer in one line. Figures mean little without them."""
    scenario = case.scenario
    topology, workload = scenario["topology"], scenario["workload"]
    job = scenario["job"]
    words = [
        "training" if job else f"{workload['operation']} of {format_size(workload['size_bytes'])}",
        f"{topology['hosts']} {'hosts' if job else 'ranks'}",
        f"{topology['planes']} plane{'' if topology['planes'] == 1 else 's'}, MTU {topology['mtu_bytes']}",
        "no segmentation offload: one loss is one packet" if topology["per_packet"] else "segmentation offload",
        *([f"impaired by {case.impairer}"] if case.impairer else []),
    ]
    if scenario["hostile"] is not None:
        words.append(f"{scenario['hostile']['packets_per_s']:,} hostile packets a second at most")
    return ", ".join(words)


def _goals(goals: list[dict[str, Any]]) -> list[str]:
    """One line per goal. Correctness goals share a line while they are met."""
    exact = [goal for goal in goals if goal["measure"] in EXACT]
    if not exact or not all(goal["met"] for goal in exact):
        return [_goal(goal) for goal in goals]
    counts = [f"{goal['value']:.0f} " for goal in exact if goal["measure"] == "results"]
    summary = f'<span class="met">{"".join(counts)}results right to the bit</span>'
    return [summary, *(_goal(goal) for goal in goals if goal["measure"] not in EXACT)]


def _goal(goal: dict[str, Any]) -> str:
    value = "not measured" if goal["value"] is None else f"{goal['value']:.4g}"
    word = "" if goal["met"] else f", {goal['word']}"
    return f'{_measure(goal["measure"])} <span class="{goal["word"]}">{value}{word}</span> ({escape(goal["text"])})'


def _measure(name: str) -> str:
    """A measure's name, linked to its meaning."""
    return f'<a class="measure" href="#measure-{escape(measures.family(name))}">{escape(name)}</a>'


def _glossary(cases: list[Case]) -> str:
    """The meaning of every measure on the page, in the order of `MEANINGS`."""
    named = [name for case in cases for name in (*case.measures, *(goal["measure"] for goal in case.goals))]
    shown = {measures.family(name) for name in named}
    rows = []
    for name, text in measures.MEANINGS.items():
        if name in shown:
            label = f"{name}*" if name.endswith(".") else name
            rows.append(f'<dt id="measure-{escape(name)}">{escape(label)}</dt><dd>{escape(text)}</dd>')
    return "<h2>What the measures mean</h2>\n<dl>\n" + "\n".join(rows) + "\n</dl>" if rows else ""


def _figures(outcome: Results) -> str:
    parts = []
    for name, figure, caption in (
        (
            "loss",
            plots.loss_figure(outcome.cases),
            "Goodput against random loss on every plane, both libraries in the same rounds under the same losses, "
            "without segmentation offload, so that one loss is one packet. A dot is the median of a round, the line "
            "joins medians of rounds. gloo has every plane's interface and takes one for each operation.",
        ),
        *(
            (
                case.name,
                plots.timeline_figure(case),
                f"{case.title}. Windows of {1e3 * case.series.get('period_s', 0.01):g} ms, bytes of all ranks added; "
                "in the grey bands some rank checks its result and nothing is sent.",
            )
            for case in outcome.cases
        ),
        *(
            (
                f"{case.name}-links",
                plots.links_figure(case),
                f"{case.title}. What each host's link carries. A dashed line is a death, coloured where it was.",
            )
            for case in outcome.cases
        ),
        (
            "shares",
            plots.shares_figure(outcome.cases),
            "What part of the bytes that sennit's ranks received came over each plane.",
        ),
    ):
        if figure is not None:
            svg = plots.as_svg(figure, name)
            parts.append(
                f"<figure>\n{svg}\n<figcaption><b>{escape(name)}</b>: {escape(caption)}</figcaption>\n</figure>"
            )
    return "<h2>Plots</h2>\n" + "\n".join(parts) if parts else ""


def _details(cases: list[Case]) -> str:
    return "<h2>Cases</h2>\n" + "\n".join(_detail(case) for case in cases)


def _detail(case: Case) -> str:
    parts = [
        # The name links to an element inside: a browser then opens the fold around its target.
        f'<details><summary><b>{escape(case.name)}</b> <span class="{case.status}">{case.status}</span></summary>',
        f'<div id="{escape(case.name)}" class="inside"></div>',
        f"<h3>Repeat</h3><pre>{escape(case.command)}</pre>",
    ]
    if case.measures:
        lines = "\n".join(f"{name:34}{_number(name, value)}" for name, value in sorted(case.measures.items()))
        parts.append(f"<h3>Measures</h3><pre>{escape(lines)}</pre>")
    if case.trainings:
        parts.append(
            f"<h3>Weights of all training runs</h3><pre>{escape(chr(10).join(digest_table(case.trainings)))}</pre>"
        )
    if case.runs:
        parts.append(f"<h3>Runs</h3><pre>{escape(_runs(case.runs))}</pre>")
        last = case.runs[-1]
        counters = "\n".join(
            f"{name:28}" + "".join(f"{rank.get(name, 0):>14,}" for rank in last["rank_counters"])
            for name in (last["rank_counters"] or [{}])[0]
        )
        if counters:
            parts.append(f"<h3>Counters of the last run, by rank</h3><pre>{escape(counters)}</pre>")
    if case.descriptions:
        parts.append(f"<h3>Ranks at the end</h3><pre>{escape(chr(10).join(case.descriptions))}</pre>")
    parts += [f"<h3>{escape(name)}</h3><pre>{escape(tail)}</pre>" for name, tail in case.log_tails.items()]
    if case.files:
        links = " · ".join(f'<a href="{escape(file)}">{escape(file)}</a>' for file in case.files)
        parts.append(f"<h3>Files</h3><p>{links}</p>")
    parts.append(f"<h3>Scenario</h3><pre>{escape(json.dumps(case.scenario, indent=1))}</pre>")
    return "\n".join([*parts, "</details>"])


def _number(name: str, value: float) -> str:
    return f"{value / GIGA:.3f} GB/s" if name.startswith("goodput.") else f"{value:.6g}"


def _runs(runs: list[dict[str, Any]]) -> str:
    lines = []
    for run in runs:
        times = run["repetition_times_s"]
        spread = f"{1e3 * min(times):.1f} to {1e3 * max(times):.1f} ms" if times else "none completed"
        variant = run["variant"]
        hosts = f"hosts {variant['layout']}, " if variant["layout"] else ""
        hosts += "scattered, " if variant["scattered"] else ""
        shares = " ".join(f"{name} {100 * share:.0f} %" for name, share in run["path_shares"].items())
        lines.append(
            f"{run['library']:7} {'disturbed' if run['disturbed'] else 'calm':10}round {run['round']}  "
            f"{hosts}{variant['algorithm']} by {variant['transport']}, {variant['paths']} paths, "
            f"seed {variant['impairment_seed'] + run['round']}: "
            f"{len(times)} repetitions, {spread}; {shares}"
        )
        for what in ("impairment", "queue"):
            done = ", ".join(f"{name} {value}" for name, value in run[f"{what}_counters"].items() if value)
            if done:
                lines.append(f"        {what}: {done}")
        lines += [f"        rank {rank}: {message}" for rank, message in run["errors"].items()]
    return "\n".join(lines)
