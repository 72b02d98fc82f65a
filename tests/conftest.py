"""Shared by all tests: gloo pools, poisoned memory, hypothesis profiles, the order of parallel runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, settings

from lightning_longctx.testing import GlooPool, Nursery, poisoned_empty

# `test` draws the same examples in every run, so that a red one can be repeated; `--hypothesis-profile=search` looks
# further.
_SLOW_IS_FINE = [HealthCheck.too_slow]
settings.register_profile("test", max_examples=50, derandomize=True, deadline=None, suppress_health_check=_SLOW_IS_FINE)
settings.register_profile("search", max_examples=1000, deadline=None, suppress_health_check=_SLOW_IS_FINE)
settings.load_profile("test")


def pytest_xdist_auto_num_workers() -> int:
    """``-n auto`` is the cores that this process may use; at most 8: a worker with its pools takes 2 to 3 GB."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, 8)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In a parallel run (``make test``) files that take long come first: what comes last must not keep one core busy.

    Whole files go to the workers, one after another, so that a file's fixtures are made once.
    """
    if hasattr(config, "workerinput"):
        slow = {item.path for item in items if item.get_closest_marker("slow")}
        processes = {item.path for item in items if "gloo" in getattr(item, "fixturenames", ())}
        items.sort(key=lambda item: (item.path not in slow, item.path not in processes))


@pytest.fixture(scope="session", autouse=True)
def _poisoned_empty() -> Iterator[None]:
    """Reading memory that nothing was written to gives NaN in every test (for the session, which suits hypothesis)."""
    with poisoned_empty():
        yield


@pytest.fixture(scope="session")
def gloo() -> Iterator[Callable[[int], GlooPool]]:
    """``gloo(num_ranks)`` returns a pool, the same one all session; worlds start when first used."""
    nursery: list[Nursery] = []
    pools: dict[int, GlooPool] = {}

    def pool(num_ranks: int) -> GlooPool:
        if not nursery:
            nursery.append(Nursery())
        if num_ranks not in pools:
            pools[num_ranks] = GlooPool(num_ranks, poison_empty=True, nursery=nursery[0])
        return pools[num_ranks]

    yield pool
    for each in pools.values():
        each.close()
    for each in nursery:
        each.close()
