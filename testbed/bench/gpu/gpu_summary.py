# SPDX-License-Identifier: Apache-2.0
"""The page of `sennit bench gpu`: what is right, what is wrong, and what is slow beside its goal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from sennit.testbed.bench.gpu import gpu

GOAL_SHARE_OF_COPY: Final = 0.3
"""Goal: an update moves at least this share of the bytes a second of a copy."""

GOAL_ALONE: Final = 0.01
"""Goal: in `sennit train` the device only copies for at most this share of the time."""

TRACEBACK_LINES: Final = 40


def page(report: Mapping[str, Any]) -> str:
    """Markdown, for one minute of reading. The parts' files beside it have everything."""
    parts, versions = report["parts"], report["versions"]
    names = ", ".join(one["name"] for one in report["gpus"]) or "no GPU: Triton's interpreter, nothing is timed"
    lines = ["# sennit on a GPU", "", names, ""]
    lines += [", ".join(f"{name} {version}" for name, version in versions.items() if version), ""]
    lines += ["| part | outcome | seconds |", "| --- | --- | --- |"]
    lines += [f"| {name} | {_outcome(part)} | {part.get('took_s', '')} |" for name, part in parts.items()]
    wrong = [f"{name.capitalize()}: {text}" for name, part in parts.items() for text in gpu.errors_of(part)]
    wrong += [f"Test {name}" for name in parts.get("tests", {}).get("failed_tests", [])]
    missing = [
        f"{name.capitalize()}: {gpu.one_line(part['skipped'])}" for name, part in parts.items() if "skipped" in part
    ]
    for title, found in (
        ("Wrong", wrong),
        ("Did not run", missing),
        ("Slow beside its goal", slow(report)),
        ("Right", right(report)),
    ):
        lines += ["", f"## {title}", ""]
        lines += [f"- {line}" for line in found] or ["Nothing."]
    if kernels := parts.get("compiler", {}).get("kernels"):
        lines += ["", f"## Hot kernels, compiled for {parts['compiler']['architecture']}", ""]
        lines += hot_kernels(kernels)
    first = next(((name, part["traceback"]) for name, part in parts.items() if "traceback" in part), None)
    if first is None:
        failures = parts.get("tests", {}).get("failures", {})
        first = next(iter(failures.items()), None)
    if first is not None:
        lines += ["", f"## The first error: {first[0]}", "", "```", *first[1].splitlines()[-TRACEBACK_LINES:], "```"]
    return "\n".join(lines) + "\n"


def slow(report: Mapping[str, Any]) -> list[str]:
    """Results that miss a goal."""
    found = [
        f"compiler, {one['kernel']} ({one['case'].removeprefix(gpu.HOT)}): {one['spill_bytes']} bytes spilled; goal: 0"
        for one in report["parts"].get("compiler", {}).get("kernels", [])
        if one["spill_bytes"] and one["case"].startswith(gpu.HOT)
    ]
    for name, part in report["parts"].items():
        for one in part.get("results", []):
            if one.get("goal_ms") is not None and one["graph_ms"] > one["goal_ms"]:
                found.append(f"{name}, {one['name']}: {one['graph_ms']:.3f} ms; goal: {one['goal_ms']:.3f} ms")
            share = one.get("share_of_copy")
            if share is not None and one["name"].startswith("backward") and share < GOAL_SHARE_OF_COPY:
                found.append(f"{name}, {one['name']}: {share:.0%} of a copy's speed; goal: {GOAL_SHARE_OF_COPY:.0%}")
            if one.get("over_sennit", 1.0) < one.get("goal_over_sennit", 0.0):
                found.append(f"{name}, {one['name']}: {gpu.text_of(one)}; goal: {one['goal_over_sennit']:.2f}")
            if one.get("alone_share", 0) > GOAL_ALONE:
                found.append(f"{name}, {one['name']}: {one['outcome']}; goal: {GOAL_ALONE:.0%}")
    return found


def right(report: Mapping[str, Any]) -> list[str]:
    """Parts that ended in order, with their figures."""
    found = []
    for name, part in report["parts"].items():
        if "error" in part or "skipped" in part:
            continue
        results = part.get("results", [])
        if name == "kernels":
            found.append(f"Kernels: the bits of the native ones in {len(results)} cases")
        elif "counts" in part:
            text = ", ".join(f"{count} {outcome}" for outcome, count in part["counts"].items())
            found.append(f"Tests marked `gpu`: {text}")
        elif "torch_operations" in part:
            found.append(
                f"Profile: an update with Adam has {part['launches']} launches and {part['torch_operations']} torch "
                "operations"
            )
        elif "kernels" in part:
            found.append(f"Compiler: {len(part['kernels'])} kernels for {part['architecture']}, all exact")
        elif name == "machine":
            if "copy_bytes_per_s" not in part:
                continue
            found.append(f"Machine: a copy reads and writes {part['copy_bytes_per_s'] / 1e9:,.0f} GB/s")
        else:
            found += [f"{name.capitalize()}, {one['name']}: {gpu.text_of(one)}" for one in results]
    return found


def hot_kernels(kernels: Iterable[Mapping[str, Any]]) -> list[str]:
    """A table with a row for each kernel, of its hot cases."""
    by_name: dict[str, list[Mapping[str, Any]]] = {}
    for one in kernels:
        if one["case"].startswith(gpu.HOT):
            by_name.setdefault(one["kernel"].removesuffix("_kernel"), []).append(one)
    lines = ["| kernel | cases | registers | bytes spilled | shared bytes | load, store |", "| --- |" + " --- |" * 5]
    for name, cases in by_name.items():
        registers = sorted(one["registers"] for one in cases)
        spilled, shared = (max(one[key] for one in cases) for key in ("spill_bytes", "shared_bytes"))
        # JSON has texts for keys.
        widest = [max((int(size) for one in cases for size in one[key]), default=0) for key in ("loads", "stores")]
        lines.append(
            f"| {name} | {len(cases)} | {registers[0]} to {registers[-1]} | {spilled} | {shared:,} | "
            f"{widest[0]}, {widest[1]} |"
        )
    return lines


def _outcome(part: Mapping[str, Any]) -> str:
    if "error" in part:
        return "wrong"
    if "skipped" in part:
        return "did not run"
    return "some tests fail" if part.get("failed_tests") else "right"
