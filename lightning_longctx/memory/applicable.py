"""Which parts of a module may run again in backward, and what is refused."""

from __future__ import annotations

from torch import nn

from lightning_longctx._upstream import composable_checkpoint, is_compiled
from lightning_longctx.memory.blocks import named_blocks
from lightning_longctx.memory.policy import ATTENTION, Checkpointing, is_kept
from lightning_longctx.memory.regions import check_regions

OURS = "longctx_block"
"""Where composable ``checkpoint`` keeps its state of a block, we keep ours."""


def runs_again(module: nn.Module, options: Checkpointing) -> dict[str, nn.Module]:
    """The parts that may run again in backward, by name.

    Raises:
        ValueError: The options do not fit the module.
    """
    blocks = named_blocks(module, options.blocks)
    _check_names(blocks, module, options)
    for name, block in blocks.items() if options.policy != "none" or options.recompute else ():
        _check_compiled(name, block, module, options)
    _check_doubled(blocks, module, options)
    if options.recompute:
        parts = [(name, part) for name in blocks for part in options.recompute]
        return {f"{name}.{part}": blocks[name].get_submodule(part) for name, part in parts}
    if options.policy == "none":  # nothing runs again for now: keep out of the way of the compiler, and of users' own
        return {name: block for name, block in blocks.items() if not (_compiled_around(module, name) or _theirs(block))}
    return blocks


def _check_names(blocks: dict[str, nn.Module], module: nn.Module, options: Checkpointing) -> None:
    if not blocks and (options != Checkpointing()):
        raise ValueError(
            f"checkpointing.policy={options.policy}, but {type(module).__name__} has no repeated blocks: no "
            "nn.ModuleList (or nn.Sequential of modules with parts) of at least two modules of one class. Name what to "
            "run again in checkpointing.blocks (layers.*)."
        )
    for name, block in blocks.items():
        for option in ("keep", "recompute", "offload", "tiles"):
            check_regions(block, getattr(options, option), option, name)
    tiles = tuple(options.tiles)
    inside = [one for one in options.keep if is_kept(one, tiles) or any(is_kept(tile, (one,)) for tile in tiles)]
    if inside:
        raise ValueError(
            f"checkpointing.keep names {inside}, of which something runs in tiles (checkpointing.tiles) and keeps "
            "nothing but its input. Leave it out of one of them."
        )


def _check_compiled(name: str, block: nn.Module, module: nn.Module, options: Checkpointing) -> None:
    needs_regions = options.policy == "auto" or options.offload or options.recompute or set(options.keep) - {ATTENTION}
    compiled = _compiled_around(module, name)
    if compiled == name and needs_regions:
        raise ValueError(
            f"{name} is compiled, and its operations cannot be told apart by submodule, measured or offloaded: "
            "use checkpointing.policy=none, full or selective without keep, recompute and offload, or leave it "
            "uncompiled."
        )
    if compiled not in (None, name):
        raise ValueError(
            f"{compiled or type(module).__name__} is compiled as a whole, so that {name} in it cannot run again alone. "
            "Compile the blocks instead, or set checkpointing.policy=none."
        )
    inner = [part for part, one in block.named_modules() if part and is_compiled(one)]
    if compiled is None and inner and options.policy in ("selective", "auto") or (inner and options.keep):
        raise ValueError(
            f"{inner[0]} in {name} is compiled, and would run uncompiled where operations are looked at one by one "
            f"(checkpointing.policy={options.policy}). Compile the whole block, or use policy=none or full."
        )


def _check_doubled(blocks: dict[str, nn.Module], module: nn.Module, options: Checkpointing) -> None:
    if options.policy == "none":
        return
    for name, block in blocks.items():
        if _theirs(block):
            raise ValueError(
                f"{name} has torch's checkpoint applied already, so that it would run twice again with "
                f"checkpointing.policy={options.policy}. Leave one of them out."
            )
    for name, part in module.named_modules():
        if getattr(part, "gradient_checkpointing", False):
            raise ValueError(
                f"{name or type(module).__name__} has gradient_checkpointing on, so that its blocks would run twice "
                f"again with checkpointing.policy={options.policy}. Leave gradient_checkpointing out."
            )


def _compiled_around(module: nn.Module, name: str) -> str | None:
    """The outermost compiled module that a block is in, itself included; None if there is none."""
    parts = name.split(".")
    around = [".".join(parts[:count]) for count in range(len(parts) + 1)]
    return next((one for one in around if is_compiled(module.get_submodule(one))), None)


def _theirs(block: nn.Module) -> bool:
    """Whether someone else lets a block run again in backward."""
    state = composable_checkpoint.state(block)
    return state is not None and not hasattr(state, OURS)
