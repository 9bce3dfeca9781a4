# SPDX-License-Identifier: Apache-2.0
"""The plan cache: compiles once for each key, limits its bytes, and evicts the least recently used plan."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from sennit.transport.algorithms import broadcast
from sennit.transport.plans.plan import Plan
from sennit.transport.plans.plan_cache import PlanCache
from sennit.transport.plans.plan_codec import encode

PLAN = broadcast(world=2, rank=0, elements=4, item_bytes=4, root=0)
PLAN_BYTES = len(encode(PLAN))


class Compiler:
    def __init__(self) -> None:
        self.runs = 0

    def __call__(self) -> Plan:
        self.runs += 1
        return PLAN


def test_a_key_is_compiled_once() -> None:
    cache, compiler = PlanCache(len), Compiler()
    assert [cache.get(("a", 1), compiler) for _ in range(3)] == [PLAN_BYTES] * 3
    assert compiler.runs == 1
    assert cache.held_bytes == PLAN_BYTES


def test_the_least_recently_used_goes_first() -> None:
    cache, compiler = PlanCache(len, limit_bytes=2 * PLAN_BYTES), Compiler()
    for key in "ab":
        cache.get(key, compiler)
    cache.get("a", compiler)
    cache.get("c", compiler)
    assert (compiler.runs, cache.held_bytes) == (3, 2 * PLAN_BYTES)
    cache.get("a", compiler)
    assert compiler.runs == 3
    cache.get("b", compiler)
    assert compiler.runs == 4


def test_a_plan_larger_than_the_cache_still_serves() -> None:
    cache, compiler = PlanCache(len, limit_bytes=1), Compiler()
    assert cache.get("a", compiler) == cache.get("b", compiler) == PLAN_BYTES
    assert cache.held_bytes == PLAN_BYTES


def test_threads_share_one_plan() -> None:
    cache: PlanCache[object] = PlanCache(lambda data: object())
    with ThreadPoolExecutor(8) as pool:
        loaded = set(pool.map(lambda _: cache.get("a", lambda: PLAN), range(64)))
    assert loaded == {cache.get("a", lambda: PLAN)}
