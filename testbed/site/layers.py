# SPDX-License-Identifier: Apache-2.0
"""Where the nodes of a flowchart lie: in layers, with few crossings and short edges (Sugiyama et al., 1981).

An edge over several layers has a bend in each of them, which takes part like a node.
"""

from __future__ import annotations

import graphlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from sennit.testbed.site.flowchart import Flowchart

GAP: Final = 22.0
GROUP_GAP: Final = 30.0  # beside a node of another box
SWEEPS: Final = 12


@dataclass
class Layers:
    order: list[list[str]]
    """The nodes and bends of each layer, left to right."""

    routes: dict[tuple[str, str], list[str]]
    """Tail and head of an edge -> the nodes and bends that it goes through, downwards, tail and head included."""

    centre: dict[str, float]
    """Node or bend -> the middle of it, from the left edge of the picture."""


def layers(chart: Flowchart, width: Mapping[str, float]) -> Layers:
    """Lays a chart out, given the widths of its nodes."""
    layer_of = _layer_of(chart)
    order: list[list[str]] = [[] for _ in range(max(layer_of.values()) + 1)]
    for node, layer in layer_of.items():
        order[layer].append(node)
    routes = {}
    for ends in dict.fromkeys((edge.tail, edge.head) for edge in chart.edges):
        tail, head = sorted(ends, key=layer_of.__getitem__)
        bends = [f"{tail}>{head}>{layer}" for layer in range(layer_of[tail] + 1, layer_of[head])]
        for bend in bends:
            layer_of[bend] = layer_of[tail] + bends.index(bend) + 1
            order[layer_of[bend]].append(bend)
        routes[ends] = [tail, *bends, head]
    links = [pair for route in routes.values() for pair in itertools.pairwise(route)]
    near = {name: ([a for a, b in links if b == name], [b for a, b in links if a == name]) for name in layer_of}
    order = _untangled(order, near, chart.group_of)
    return Layers(order, routes, _centres(order, near, width, chart.group_of))


def _layer_of(chart: Flowchart) -> dict[str, int]:
    """Each node below all that point to it, and those that nothing points to right above what they point to.

    Edges that would close a circle point up.
    """
    after: dict[str, list[str]] = {node: [] for node in chart.labels}
    for edge in chart.edges:
        after[edge.tail].append(edge.head)
    before: dict[str, set[str]] = {node: set() for node in chart.labels}
    done: set[str] = set()

    def walk(node: str, path: frozenset[str]) -> None:
        for head in after[node]:
            if head not in path:
                before[head].add(node)
                if head not in done:
                    walk(head, path | {head})
        done.add(node)

    for node in sorted(chart.labels, key=lambda node: any(node in heads for heads in after.values())):
        if node not in done:
            walk(node, frozenset({node}))
    layer_of: dict[str, int] = {}
    for node in graphlib.TopologicalSorter(before).static_order():
        layer_of[node] = max((layer_of[other] + 1 for other in before[node]), default=0)
    for node in chart.labels:
        if not before[node] and after[node]:
            layer_of[node] = max(0, min(layer_of[other] for other in after[node]) - 1)
    return {node: layer_of[node] for node in chart.labels}


def _crossings(order: Sequence[Sequence[str]], near: Mapping[str, tuple[list[str], list[str]]]) -> int:
    count = 0
    for upper, lower in itertools.pairwise(order):
        place = {name: number for number, name in enumerate(lower)}
        ends = [place[head] for tail in upper for head in sorted(near[tail][1], key=place.__getitem__)]
        count += sum(a > b for a, b in itertools.combinations(ends, 2))
    return count


def _untangled(
    order: list[list[str]], near: Mapping[str, tuple[list[str], list[str]]], group_of: Mapping[str, str]
) -> list[list[str]]:
    """The order with the fewest crossings that sweeps down and up find: each node at the mean of its neighbours."""
    best = [list(layer) for layer in order]
    for sweep in range(SWEEPS):
        down = sweep % 2 == 0
        numbers = range(1, len(order)) if down else range(len(order) - 2, -1, -1)
        for number in numbers:
            beside = order[number - 1 if down else number + 1]
            place = {name: float(position) for position, name in enumerate(beside)}
            mean = {
                name: _mean([place[other] for other in near[name][0 if down else 1]], float(position))
                for position, name in enumerate(order[number])
            }
            order[number] = _sorted_in_groups(order[number], mean, group_of)
        if _crossings(order, near) < _crossings(best, near):
            best = [list(layer) for layer in order]
    return best


def _sorted_in_groups(names: list[str], mean: Mapping[str, float], group_of: Mapping[str, str]) -> list[str]:
    """Nodes of one box stay side by side."""

    def group_mean(name: str) -> float:
        return _mean([mean[other] for other in names if group_of.get(other, other) == group_of.get(name, name)], 0.0)

    return sorted(names, key=lambda name: (group_mean(name), group_of.get(name, name), mean[name]))


def _centres(
    order: Sequence[Sequence[str]],
    near: Mapping[str, tuple[list[str], list[str]]],
    width: Mapping[str, float],
    group_of: Mapping[str, str],
) -> dict[str, float]:
    def apart(left: str, right: str) -> float:
        gap = GAP if group_of.get(left) == group_of.get(right) else GROUP_GAP
        return (width.get(left, 0.0) + width.get(right, 0.0)) / 2 + gap

    centre = {name: 0.0 for layer in order for name in layer}
    for _ in range(20 * SWEEPS):
        for layer in (*order, *reversed(order)):
            beside = [[centre[other] for side in near[name] for other in side] or [centre[name]] for name in layer]
            wanted = [(_mean(places, 0.0), len(places)) for places in beside]
            centre.update(zip(layer, _spread(layer, wanted, apart), strict=True))
    left = min(centre[name] - width.get(name, 0.0) / 2 for name in centre)
    return {name: middle - left for name, middle in centre.items()}


def _spread(
    names: Sequence[str], wanted: Sequence[tuple[float, int]], apart: Callable[[str, str], float]
) -> list[float]:
    """The places nearest to those wanted, in weighted least squares, that keep the order and the distances.

    Less the distances, the places must rise: pool adjacent violators (isotonic regression).
    """
    distances = [0.0, *itertools.accumulate(apart(*pair) for pair in itertools.pairwise(names))]
    pools: list[tuple[float, int, int]] = []  # place, weight, how many nodes
    for (place, weight), distance in zip(wanted, distances, strict=True):
        pools.append((place - distance, weight, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (high, much, many), (low, little, few) = pools[-2:]
            pools[-2:] = [((high * much + low * little) / (much + little), much + little, many + few)]
    places = [place for place, _, count in pools for _ in range(count)]
    return [place + distance for place, distance in zip(places, distances, strict=True)]


def _mean(values: Sequence[float], default: float) -> float:
    return sum(values) / len(values) if values else default
