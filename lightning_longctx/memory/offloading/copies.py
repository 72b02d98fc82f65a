"""Copies between a device and host memory, beside the work of the device."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor


class Copies(Protocol):
    """Copies that run beside the work of a device. What they return says when one is done."""

    def memory(self, num_bytes: int) -> Tensor:
        """Host memory, uint8, that they can reach."""
        ...

    def out(self, host: Tensor, tensor: Tensor) -> Any:
        """Copy to the host what the work queued so far leaves in ``tensor``, after all copies begun so far."""
        ...

    def back(self, tensor: Tensor, host: Tensor, after: Any) -> Any:
        """Copy from the host, once ``after`` is done and the work queued so far has left the memory of ``tensor``."""
        ...

    def hold(self, copy: Any) -> None:
        """Let the work queued from now on wait for it. The host does not wait."""
        ...

    def is_done(self, copy: Any) -> bool:
        """Whether it is."""
        ...

    def finish(self) -> None:
        """Wait for all of them."""
        ...


class CudaCopies:
    """Two streams, as the two directions of a link to the host do not share it.

    Args:
        device: Whose current stream does the work.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out, self._back = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def memory(self, num_bytes: int) -> Tensor:
        """See ``Copies``."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def out(self, host: Tensor, tensor: Tensor) -> Any:
        """See ``Copies``."""
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        self._out.wait_stream(self._back)  # which may still read what was in this slot
        with torch.cuda.stream(self._out):
            host.copy_(tensor, non_blocking=True)
        return self._out.record_event()

    def back(self, tensor: Tensor, host: Tensor, after: torch.cuda.Event) -> Any:
        """See ``Copies``."""
        self._back.wait_stream(torch.cuda.current_stream(self._device))
        self._back.wait_event(after)
        with torch.cuda.stream(self._back):
            tensor.copy_(host, non_blocking=True)
        return self._back.record_event()

    def hold(self, copy: torch.cuda.Event) -> None:
        """See ``Copies``."""
        torch.cuda.current_stream(self._device).wait_event(copy)

    def is_done(self, copy: torch.cuda.Event) -> bool:
        """See ``Copies``."""
        return copy.query()

    def finish(self) -> None:
        """See ``Copies``."""
        self._out.synchronize()
        self._back.synchronize()
