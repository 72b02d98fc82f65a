"""The chosen arrangement is the one that was the fastest on emulated clusters, and is one that can run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_longctx.plan.arrange import choose_arrangement, explain_arrangements
from lightning_longctx.plan.communication import Communication
from lightning_longctx.plan.shape import AttentionShape
from lightning_longctx.topology.degrees import Degrees
from lightning_longctx.topology.links import Links


def emulated(num_ranks: int, nic_mbit: float, schedule: str = "direct", keep_kv: bool = False) -> Communication:
    """Two cores that all ranks share, float32, links inside a node that the kernel copies over."""
    links = Links(inner_gbits=8, outer_gbits=nic_mbit / 1000, teraflops=0.16 / num_ranks, latency_us=100)
    return Communication(schedule, keep_kv, None, links)  # type: ignore[arg-type]


# (nodes, ranks per node, Mbit/s of a NIC, key/value heads): the fastest that `bench ring` measured, without keep_kv
MEASURED = {
    (2, 4, 100, 8): "heads inside",  # 0.60 s, double ring 0.71
    (2, 4, 25, 2): "double ring",  # 0.64 s, heads inside 1.14
    (2, 2, 200, 8): "heads inside",  # 0.54 s, double ring 0.58
    (4, 2, 100, 8): "heads a",  # alone 1.10 s, across 1.15, double ring 1.48
}


@pytest.mark.parametrize("cluster", MEASURED)
@pytest.mark.parametrize("copy_gbits", [None, 14.0])
def test_the_fastest_on_the_emulated_cluster_is_chosen(cluster, copy_gbits):
    nodes, per_node, mbit, kv_heads = cluster
    ways = emulated(nodes * per_node, mbit)
    if copy_gbits is not None:
        ways = replace(ways, links=replace(ways.links, copy_gbits=copy_gbits * 2 / (nodes * per_node)))
    rows = explain_arrangements(nodes, per_node, 4096, AttentionShape(8, kv_heads, 64, 4), communication=ways)
    (chosen,) = [row for row in rows if row.is_chosen]
    assert chosen.name.startswith(MEASURED[cluster])
    assert choose_arrangement(nodes, per_node, 4096, AttentionShape(8, kv_heads, 64, 4), communication=ways) == (
        chosen.degrees
    )


# nodes, ranks per node, Mbit/s, arrangement, keep_kv, measured milliseconds
FIGURES = [
    (2, 4, 100, "double ring", True, 455),
    (2, 4, 100, "heads inside nodes, ring across", True, 471),
    (2, 4, 100, "heads alone", False, 779),
    (2, 2, 200, "double ring", True, 432),
    (2, 2, 200, "heads inside nodes, ring across", True, 431),
    (2, 2, 200, "heads alone", False, 877),
    (4, 2, 100, "heads alone", False, 946),
    (4, 2, 100, "double ring", True, 1054),
]


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: "-".join(map(str, figure)))
def test_estimates_are_near_what_was_measured(figure):
    nodes, per_node, mbit, name, keep_kv, milliseconds = figure
    ways = emulated(nodes * per_node, mbit, keep_kv=keep_kv)
    rows = explain_arrangements(nodes, per_node, 4096, AttentionShape(8, 8, 64, 4), communication=ways)
    estimate = next(row.estimate for row in rows if row.name == name)
    assert estimate is not None
    assert 0.75 < estimate.seconds * 1000 / milliseconds < 1.33


@pytest.mark.parametrize(("nodes", "per_node"), [(1, 1), (1, 8), (4, 1), (2, 4), (3, 2)])
def test_every_arrangement_uses_all_ranks(nodes, per_node):
    rows = explain_arrangements(nodes, per_node, 4800, AttentionShape(24, 12, 64))
    assert [row.degrees.resolve(nodes * per_node) for row in rows] == [row.degrees for row in rows]
    assert sum(row.is_chosen for row in rows) == 1
    assert len({row.degrees for row in rows}) == len(rows)


def test_heads_that_do_not_fit_say_why_and_are_not_chosen():
    rows = explain_arrangements(2, 4, 4096, AttentionShape(heads=6, kv_heads=3, width=64))
    refused = {row.name for row in rows if row.refusal}
    assert refused == {"heads inside nodes, ring across", "heads across nodes, ring inside", "heads alone"}
    assert all((row.estimate is None) == bool(row.refusal) for row in rows)
    assert choose_arrangement(2, 4, 4096, AttentionShape(heads=6, kv_heads=3, width=64)) == Degrees(
        data=1, context=8, inner_ring=4
    )
