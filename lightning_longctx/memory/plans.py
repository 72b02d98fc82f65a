"""What is done with every region of every block: what policies are turned into, and what the solver returns. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning_longctx.memory.policy import Checkpointing


@dataclass(frozen=True)
class BlockPlan:
    """What backward has of one block.

    Args:
        checkpointed: The block runs again in backward, but for what is kept; else everything is kept.
        keep: Regions whose results are kept.
        offload: Those of them that are kept in host memory.
    """

    checkpointed: bool = False
    keep: frozenset[str] = frozenset()
    offload: frozenset[str] = frozenset()


@dataclass(frozen=True)
class MemoryPlan:
    """One plan for every block, in the order in which they run.

    Args:
        name: Of the policy.
        blocks: The plans.
    """

    name: str
    blocks: tuple[BlockPlan, ...]

    def to_dict(self) -> dict[str, Any]:
        """As plain values, which any checkpoint can hold."""
        blocks = [
            {"checkpointed": block.checkpointed, "keep": sorted(block.keep), "offload": sorted(block.offload)}
            for block in self.blocks
        ]
        return {"name": self.name, "blocks": blocks}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> MemoryPlan:
        """Inverse of ``to_dict``."""
        blocks = tuple(
            BlockPlan(block["checkpointed"], frozenset(block["keep"]), frozenset(block["offload"]))
            for block in values["blocks"]
        )
        return cls(values["name"], blocks)


def fixed_plan(options: Checkpointing, num_blocks: int) -> MemoryPlan:
    """The same for all blocks: what a policy says that needs no measuring; ``auto`` begins as ``full``.

    Args:
        options: The user's.
        num_blocks: How many blocks there are.
    """
    offload = frozenset(options.offload) if options.policy != "auto" else frozenset()
    block = BlockPlan(options.policy != "none" or bool(options.recompute), frozenset(options.kept), offload)
    return MemoryPlan(options.policy, (block,) * num_blocks)
