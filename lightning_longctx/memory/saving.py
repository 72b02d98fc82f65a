"""One pass of a block and its recomputation: what is kept in the first is not computed in the second.

Two dispatch modes, as PyTorch's own selective checkpointing has (``torch.utils.checkpoint``). It tells operations apart
by what they are alone; here the region counts that they run in, and what is kept may wait in host memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from lightning_longctx._upstream import (
    TorchDispatchMode,
    local_part,
    shares_version,
    tensor_around,
    tree_leaves,
    tree_map_only,
    version_of,
)
from lightning_longctx.memory.offloading.offload import Place, Store
from lightning_longctx.memory.plans import BlockPlan
from lightning_longctx.memory.policy import is_kept
from lightning_longctx.memory.regions import RING_OPS, Regions, can_be_kept, new_storages


@dataclass
class _Kept:
    """A tensor, or where it waits.

    Args:
        tensor: What the operation returned; None if it is elsewhere.
        version: How often it had been changed when it was kept.
        away: It is to wait in host memory.
        place: Where it does.
        whole: Makes of this rank's part, which came back, what it was a part of.
    """

    tensor: Tensor | None
    version: int
    away: bool
    place: Place | None = None
    whole: Callable[[Tensor], Tensor] = lambda part: part

    @classmethod
    def of(cls, tensor: Tensor, away: bool) -> _Kept:
        """Keep a tensor."""
        return cls(shares_version(tensor), version_of(tensor), away)

    def leave(self, store: Store | None) -> None:
        """Begin to go to host memory: not before the block is done, which may still change the tensor in place."""
        assert self.tensor is not None and store is not None
        self.whole, self.place = tensor_around(self.tensor), store.put(local_part(self.tensor))
        self.tensor = None

    def was_changed(self) -> bool:
        """Whether it has been changed in place since it was kept; in host memory nothing changes it."""
        return self.tensor is not None and version_of(self.tensor) != self.version

    def back(self) -> Tensor | None:
        """The tensor, from wherever it is."""
        return self.tensor if self.place is None else self.whole(self.place.get())


@dataclass
class _Call:
    """An operation of a kept region, the shapes of its arguments, and what is kept of its results."""

    op: Any
    shapes: tuple[tuple[int, ...], ...]
    kept: Any


def _shapes(given: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(one.shape) for one in tree_leaves(given) if isinstance(one, Tensor))


@dataclass(eq=False)
class Pass:
    """What one pass through a block leaves for its recomputation.

    Args:
        plan: What to keep.
        regions: Of the block.
        name: Of the block, for errors.
        offload: Where offloaded results wait.
        before_again: Called with this when the recomputation begins.
    """

    plan: BlockPlan
    regions: Regions
    name: str
    offload: Store | None = None
    before_again: Callable[[Pass], None] = lambda which: None
    _results: list[_Call] = field(default_factory=list)
    """Of kept regions, in the order in which they ran."""

    @property
    def places(self) -> list[Place]:
        """Where results of this pass wait in host memory."""
        kept = [one for call in self._results for one in _leaves(call.kept)]
        return [one.place for one in kept if one.place is not None]

    def modes(self) -> tuple[TorchDispatchMode, TorchDispatchMode]:
        """For the first pass, and for the recomputation."""
        return _Keeping(self), _Again(self)

    def region(self, op: Any, args: Any, kwargs: Any) -> str | None:
        """The region of an operation if its results are kept, else None."""
        region = self.regions.of(op)
        return region if is_kept(region, self.plan.keep) and can_be_kept(op, args, kwargs) else None

    def keep(self, op: Any, region: str, results: Any, given: Any) -> None:
        """Keep what an operation returned, unless that is memory of its arguments, as of a view."""
        kept = None
        if new_storages(results, given):
            away = self.offload is not None and is_kept(region, self.plan.offload)
            kept = tree_map_only(Tensor, partial(_Kept.of, away=away), results)
        self._results.append(_Call(op, _shapes(given), kept))

    def settle(self) -> None:
        """The first pass is over: forget what was changed in place meanwhile, and has to be computed again.

        Raises:
            RuntimeError: It is attention over ranks, which cannot be run again by those alone that changed it.
        """
        for call in self._results:
            if self._was_changed(call.op, call.kept):
                call.kept = None
            for kept in (one for one in _leaves(call.kept) if one.away):
                kept.leave(self.offload)

    def take(self, op: Any, region: str, given: Any, count: int) -> Any:
        """What the operation returned that ran as the ``count``-th in kept regions; once.

        Returns:
            None where it was changed in place since: its arguments are there, and it must run again, as what changed it
            will.

        Raises:
            RuntimeError: Another operation ran there in forward; or see ``settle``.
        """
        call = self._results[count] if count < len(self._results) else None
        if call is None or (call.op, call.shapes) != (op, _shapes(given)):
            ran = "nothing" if call is None else f"{call.op} on {list(call.shapes)}"
            raise RuntimeError(
                f"{self.name} runs otherwise in its recomputation than in forward: in region {region!r}, {op} on "
                f"{list(_shapes(given))}, where {ran} ran (a table that is made in the first call, say). Make such "
                "things in __init__, leave the region out of checkpointing.keep, or set checkpointing.policy=full."
            )
        found, call.kept = call.kept, None
        if found is None or self._was_changed(op, found):
            return None
        return tree_map_only(_Kept, _Kept.back, found)

    def _was_changed(self, op: Any, result: Any) -> bool:
        if not any(map(_Kept.was_changed, _leaves(result))):
            return False
        if op in RING_OPS:
            raise RuntimeError(
                f"what attention returned in {self.name} was changed in place afterwards (x.mul_(2), say), so that "
                "it is lost for backward, and other ranks may have kept theirs. Change a copy (x * 2), or set "
                "checkpointing.policy=full."
            )
        return True


def _leaves(result: Any) -> list[_Kept]:
    found: list[_Kept] = []
    tree_map_only(_Kept, found.append, result)
    return found


class _Keeping(TorchDispatchMode):
    """The first pass."""

    def __init__(self, owner: Pass) -> None:
        super().__init__()
        self._pass = owner

    def __enter__(self) -> Any:
        self._pass.regions.enter()
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._pass.settle()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        if (region := self._pass.region(func, args, kwargs)) is not None:
            self._pass.keep(func, region, results, (args, kwargs))
        return results


class _Again(TorchDispatchMode):
    """The recomputation."""

    def __init__(self, owner: Pass) -> None:
        super().__init__()
        self._pass = owner
        self._count = 0

    def __enter__(self) -> Any:
        self._pass.regions.enter()
        self._count = 0
        self._pass.before_again(self._pass)
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (region := self._pass.region(func, args, kwargs)) is None:
            return func(*args, **(kwargs or {}))
        kept = self._pass.take(func, region, (args, kwargs), self._count)
        self._count += 1
        return func(*args, **(kwargs or {})) if kept is None else kept
