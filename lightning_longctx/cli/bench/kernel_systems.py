"""What ``bench kernels`` compares: PyTorch's flash attention, and this package on one rank with each backend."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_longctx.attention import attend
from lightning_longctx.attention.backends import BACKENDS, Needs
from lightning_longctx.cli.bench.attention_case import (
    AttentionCase,
    forward_backward,
    scaled_dot_product,
    whole_sequence,
)
from lightning_longctx.cli.bench.systems import Job
from lightning_longctx.sequence import SequenceRecord

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class KernelSystem:
    """One way to compute attention on one device.

    Args:
        name: ``torch``, or that of a backend.
        device: Where.
    """

    name: str
    device: str

    def attention(self, case: AttentionCase) -> Attention:
        """Of query, key and value."""
        mask = case.visible.mask
        if self.name == "torch":
            return lambda q, k, v: _flash(q, k, v, mask.causal)
        record = SequenceRecord(length=case.tokens, documents=case.documents, backend=self.name)
        return lambda q, k, v: attend(q, k, v, sequence=record, causal=mask.causal, window=mask.window)

    def inputs(self, case: AttentionCase) -> list[Tensor]:
        """Query, key, value (leaves) and the gradient of the output, on the device."""
        *leaves, grad = (tensor.detach().to(self.device) for tensor in case.inputs(whole_sequence))
        return [leaf.requires_grad_() for leaf in leaves] + [grad]

    def job(self, case: AttentionCase) -> Job:
        """Forward and backward, to be checked."""
        *leaves, grad = self.inputs(case)
        attention = self.attention(case)
        return Job(lambda: forward_backward(attention, leaves, grad), whole_sequence, dict, lambda: None, _on_cpu)


class Timed(NamedTuple):
    """Seconds of every repeat: forward alone, and forward with backward."""

    name: str
    forward: tuple[float, ...]
    both: tuple[float, ...]


def kernel_systems(case: AttentionCase, device: str) -> tuple[tuple[KernelSystem, ...], dict[str, str]]:
    """Systems that can compute the case, and of the others why not. The slow twin is no competitor."""
    needs = Needs(torch.device(device), getattr(torch, case.dtype), case.width, case.visible.mask.window is not None)
    absent = {name: BACKENDS[name].refusal(needs) for name in BACKENDS if name != "reference"}
    able = [name for name, reason in absent.items() if reason is None]
    reasons = {name: reason for name, reason in absent.items() if reason is not None}
    if case.visible.kind not in ("causal", "full"):
        reasons["torch"] = f"PyTorch's flash attention knows no {case.visible.kind}"
    elif "aten" in reasons:
        reasons["torch"] = reasons["aten"]
    else:
        able.insert(0, "torch")
    if not able:
        raise ValueError(f"no system can compute {case}: {reasons}.")
    return tuple(KernelSystem(name, device) for name in able), reasons


def timed_in_turn(systems: Sequence[KernelSystem], case: AttentionCase, repeats: int, warmup: int) -> list[Timed]:
    """Time all systems on one case, in turn, so that a GPU that clocks down does so for all of them."""
    runs = {system.name: runs_of(system, case) for system in systems}
    seconds: dict[str, list[tuple[float, float]]] = {system.name: [] for system in systems}
    for repeat in range(warmup + repeats):
        for system in systems:
            forward, both = runs[system.name]
            sample = (seconds_of(forward, system.device), seconds_of(both, system.device))
            if repeat >= warmup:
                seconds[system.name].append(sample)
    return [Timed(name, *zip(*samples, strict=True)) for name, samples in seconds.items()]


def runs_of(system: KernelSystem, case: AttentionCase) -> tuple[Callable[[], object], Callable[[], object]]:
    """Forward alone, without a graph, and forward with backward."""
    *leaves, grad = system.inputs(case)
    attention = system.attention(case)

    def forward() -> Tensor:
        with torch.no_grad():
            return attention(*leaves)

    return forward, lambda: forward_backward(attention, leaves, grad)


def seconds_of(run: Callable[[], object], device: str) -> float:
    """Wall time of one run, from an idle device to an idle device."""
    _wait(device)
    start = time.perf_counter()
    result = run()
    _wait(device)
    del result
    return time.perf_counter() - start


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _flash(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return scaled_dot_product(query, key, value, is_causal=causal, enable_gqa=True)


def _on_cpu(results: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.cpu() for name, tensor in results.items()}
