"""Stands in for the streams of a device."""

from __future__ import annotations

import torch
from torch import Tensor


class LaterCopies:
    """Copies as a stream makes them: late, when somebody holds for them; ``journal`` says in which order."""

    def __init__(self) -> None:
        self.waiting: list[tuple[int, Tensor, Tensor]] = []
        self.journal: list[str] = []
        self.num_copies = 0

    def memory(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def out(self, host: Tensor, tensor: Tensor) -> int:
        return self._later("out", host, tensor)

    def back(self, tensor: Tensor, host: Tensor, after: int) -> int:
        self.hold(after)
        return self._later("back", tensor, host)

    def _later(self, kind: str, target: Tensor, source: Tensor) -> int:
        self.num_copies += 1
        self.journal.append(f"{kind} {self.num_copies}")
        self.waiting.append((self.num_copies, target, source))
        return self.num_copies

    def hold(self, copy: int) -> None:
        while self.waiting and self.waiting[0][0] <= copy:
            _, target, source = self.waiting.pop(0)
            target.copy_(source)

    def is_done(self, copy: int) -> bool:
        return not self.waiting or copy < self.waiting[0][0]

    def finish(self) -> None:
        self.hold(self.num_copies)
