"""A memory plan as a table for people."""

from __future__ import annotations

from itertools import groupby

from lightning_longctx.memory.choice.costs import BlockCost, StepCosts, again_seconds, kept_bytes, predict
from lightning_longctx.memory.plans import BlockPlan, MemoryPlan, fixed_plan
from lightning_longctx.memory.policy import GIB, Checkpointing, PolicyName

MIB = 2**20


def plan_table(costs: StepCosts, plan: MemoryPlan, budget_bytes: int) -> str:
    """The plan, what it costs, and what the fixed policies would cost, in Markdown.

    Args:
        costs: What the plan was chosen by.
        plan: The choice.
        budget_bytes: That it had to fit.
    """
    rows = ["| blocks | kept for backward | MiB kept in all | seconds to run again |", "|---|---|---|---|"]
    described = [(cost, block, describe(cost, block)) for cost, block in zip(costs.blocks, plan.blocks, strict=True)]
    for what, group in groupby(described, key=lambda entry: entry[2]):
        members = list(group)
        kept = sum(kept_bytes(cost, block) for cost, block, _ in members) / MIB
        again = sum(again_seconds(cost, block, costs.offload_bytes_per_second) for cost, block, _ in members)
        names = [cost.name for cost, _, _ in members]
        name = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        rows.append(f"| {name} | {what} | {kept:.1f} | {again:.4f} |")
    rows += ["", "| policy | seconds | peak GiB | when | fits |", "|---|---|---|---|---|"]
    for name, one in {"auto": plan, **fixed_plans(costs)}.items():
        found = predict(costs, one)
        fits = "yes" if found.peak_bytes <= budget_bytes else "no"
        rows.append(f"| {name} | {found.seconds:.4f} | {found.peak_bytes / GIB:.3f} | {found.moment} | {fits} |")
    return "\n".join([*rows, "", f"Budget of a step: {budget_bytes / GIB:.3f} GiB beyond what is there before it."])


def describe(cost: BlockCost, plan: BlockPlan) -> str:
    """What is kept of a block, in words."""
    if not plan.checkpointed:
        return "everything"
    names = [region.name for region in cost.regions if region.name in plan.keep]
    return ", ".join(name + " (offloaded)" * (name in plan.offload) for name in names) or "only what goes in"


def fixed_plans(costs: StepCosts) -> dict[str, MemoryPlan]:
    """``none``, ``selective`` and ``full`` for as many blocks."""
    names: tuple[PolicyName, ...] = ("none", "selective", "full")
    return {name: fixed_plan(Checkpointing(name), len(costs.blocks)) for name in names}
