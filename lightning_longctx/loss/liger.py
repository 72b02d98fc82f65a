"""The same loss by the Triton kernels of liger-kernel (arXiv 2410.10989)."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_longctx.batch import IGNORE

_OTHERWISE = "Use loss.kernel=torch, which computes the same in tiles."


def liger_cross_entropy(
    states: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As ``linear_cross_entropy``; weight gradients are summed over liger's own tiles in float32.

    Args:
        states: [..., width], on CUDA.
        weight: [V, width], not cut.
        labels: [...] int64, already shifted; -100 where nothing counts.
        bias: [V].

    Returns:
        The sum, and the int64 number of labels that count.

    Raises:
        ValueError: The package is missing, a tensor is not on CUDA, or the matrix is cut over tensor ranks.
    """
    if isinstance(states, DTensor) or isinstance(weight, DTensor):
        raise ValueError(f"loss.kernel=liger knows no matrix that tensor ranks share (degrees.tensor). {_OTHERWISE}")
    if not states.is_cuda:
        raise ValueError(f"loss.kernel=liger needs CUDA, but this run is on {states.device.type}. {_OTHERWISE}")
    flat = states.reshape(labels.numel(), states.shape[-1])
    ignore, z_loss, smoothing, softcap = IGNORE, 0.0, 0.0, None
    arguments = (bias, None, ignore, z_loss, smoothing, "sum", softcap, False, torch.float32)
    total, *_ = _function().apply(flat, weight, labels.flatten(), *arguments)
    return total, (labels != IGNORE).sum()


def check_liger(device: torch.device, num_tensor_ranks: int) -> None:
    """Raise ``ValueError`` if the kernels cannot run here, before a model is asked for anything.

    Args:
        device: Of the run.
        num_tensor_ranks: Degree of tensor parallelism.
    """
    if num_tensor_ranks > 1:
        raise ValueError(f"loss.kernel=liger with degrees.tensor={num_tensor_ranks} is not available. {_OTHERWISE}")
    if device.type != "cuda":
        raise ValueError(f"loss.kernel=liger needs CUDA, but this run is on {device.type}. {_OTHERWISE}")
    _function()


def _function() -> Any:
    if find_spec("liger_kernel") is None:
        raise ValueError(f"loss.kernel=liger needs the package: pip install liger-kernel. {_OTHERWISE}")
    return import_module("liger_kernel.ops.fused_linear_cross_entropy").LigerFusedLinearCrossEntropyFunction
