"""What a peer sends, counted from the calls of ``torch.distributed`` that it makes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_longctx._upstream import TorchDispatchMode

_SENDS_NOTHING = ("recv_", "wait_tensor", "_wrap_tensor_autograd", "barrier", "monitored_barrier_")


def count_sent(run: Callable[[], object], rank: int, ranks_per_node: int) -> Counter[str]:
    """Run something and count the bytes that this rank sends meanwhile.

    Collectives count as gloo does them (measured on the wire, 2 and 4 ranks): all-gather passes parts around a ring;
    reduce-scatter is an all-reduce, which sends twice what it should.

    Args:
        run: Communicates over any process groups; functional collectives over the default one.
        rank: This rank.
        ranks_per_node: Neighbours; messages between them count as ``inner``, others as ``outer``.

    Returns:
        Bytes by link.

    Raises:
        ValueError: It calls a collective that is not known here.
    """
    with _Counting(rank, ranks_per_node) as counting:
        run()
    return counting.sent


def bytes_by_peer(operation: str, tensors: list[Any], peers: int, position: int) -> Mapping[int, int]:
    """Bytes that one call sends, by position of the receiver in its group.

    Args:
        operation: Name of a ``c10d`` or ``_c10d_functional`` operation.
        tensors: Its input tensor, or list of tensors; for ``send`` also the receiver, for uneven all-to-all the sizes.
        peers: Ranks in the group.
        position: This rank's.

    Raises:
        ValueError: It is not known here.
    """
    inputs, *details = tensors
    after = (position + 1) % peers
    if operation in _SENDS_NOTHING:
        return {}
    if operation == "send":
        return {details[0]: sum(tensor.nbytes for tensor in inputs)}
    if operation in ("_allgather_base_", "allgather_", "all_gather_into_tensor"):
        return {after: _nbytes(inputs) * (peers - 1)}
    if operation in ("_reduce_scatter_base_", "reduce_scatter_tensor"):
        return {after: 2 * _nbytes(inputs) // peers * (peers - 1)}
    if operation in ("alltoall_base_", "all_to_all_single"):
        rows = inputs.shape[0]
        sizes = details[0] or [rows // peers] * peers
        each = [inputs.nbytes // rows * size for size in sizes]
    elif operation == "alltoall_":
        each = [tensor.nbytes for tensor in inputs]
    else:
        raise ValueError(f"the bytes of {operation} cannot be counted: it is not known here.")
    return {peer: num for peer, num in enumerate(each) if peer != position}


class _Counting(TorchDispatchMode):
    """Sees every operation before it is carried out."""

    def __init__(self, rank: int, ranks_per_node: int) -> None:
        super().__init__()
        self.sent: Counter[str] = Counter()
        self._rank, self._per_node = rank, ranks_per_node

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count(func.name().partition("::")[2].partition(".")[0], args)
        return func(*args, **(kwargs or {}))

    def _count(self, operation: str, args: Any) -> None:
        members, called = _group_and_inputs(operation, args)
        position = members.index(self._rank)
        for peer, num in bytes_by_peer(operation, called, len(members), position).items():
            same = members[peer] // self._per_node == self._rank // self._per_node
            self.sent["inner" if same else "outer"] += num


def _group_and_inputs(operation: str, args: Any) -> tuple[list[int], list[Any]]:
    """Global ranks of the call's group, and what ``bytes_by_peer`` wants to know."""
    boxed = next((arg for arg in args if isinstance(arg, torch.ScriptObject)), None)
    group = dist.group.WORLD if boxed is None else dist.ProcessGroup.unbox(boxed)
    members = dist.get_process_group_ranks(group)
    if operation == "send":
        return members, [args[0], args[2]]
    if operation == "alltoall_base_":
        return members, [args[1], args[4]]
    if operation in ("_allgather_base_", "_reduce_scatter_base_", "allgather_", "alltoall_"):
        return members, [args[1]]
    if operation == "all_to_all_single":
        return members, [args[0], args[2]]
    return members, [args[0]]


def _nbytes(inputs: Any) -> int:
    tensors = [inputs] if isinstance(inputs, Tensor) else inputs
    return sum(tensor.nbytes for tensor in tensors)
