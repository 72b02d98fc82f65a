"""Where random numbers come from, kept from forward for backward."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RandomState:
    """Where torch's generators stand that a module on one device can draw from.

    Args:
        cpu: State of the CPU's generator.
        device: State of the device's own; None on CPU.
        on: The device.
    """

    cpu: Tensor
    device: Tensor | None
    on: torch.device

    @classmethod
    def now(cls, device: torch.device) -> RandomState:
        """Where they stand at this moment."""
        own = None if device.type in ("cpu", "meta") else torch.get_device_module(device).get_rng_state(device)
        return cls(torch.get_rng_state(), own, device)

    def restore(self) -> None:
        """Put them back there."""
        torch.set_rng_state(self.cpu)
        if self.device is not None:
            torch.get_device_module(self.on).set_rng_state(self.device, self.on)

    def equals(self, other: RandomState) -> bool:
        """Whether nothing was drawn between the two."""
        pairs = [(self.cpu, other.cpu), (self.device, other.device)]
        return all(torch.equal(mine, theirs) for mine, theirs in pairs if mine is not None and theirs is not None)
