"""The random state of every rank, as plain values for a checkpoint."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

State = dict[str, Any]
"""Of one rank: tensors and numbers, which ``torch.load(weights_only=True)`` reads."""


def random_state(device: torch.device) -> State:
    """What Python, NumPy and torch (on the CPU and on ``device``) draw next."""
    version, words, gauss = random.getstate()
    numpy: dict[str, Any] = np.random.get_state(legacy=False)  # type: ignore[assignment]
    key = torch.from_numpy(numpy["state"]["key"].astype(np.int64))
    return {
        "python": [version, torch.tensor(words, dtype=torch.int64), gauss],
        "numpy": [key, int(numpy["state"]["pos"]), int(numpy["has_gauss"]), float(numpy["gauss"])],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def set_random_state(state: State, device: torch.device) -> None:
    """Draw from there on. A state that was saved without a GPU leaves the GPU's generator alone."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    key, position, has_gauss, gauss = state["numpy"]
    np.random.set_state(("MT19937", key.numpy().astype(np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)


def by_rank(states: list[State]) -> dict[str, Any]:
    """States of all ranks; most ranks share one, which is kept once."""
    distinct: dict[bytes, int] = {}
    places = [distinct.setdefault(_fingerprint(state), len(distinct)) for state in states]
    return {"distinct": [states[places.index(place)] for place in range(len(distinct))], "by_rank": places}


def of_rank(saved: dict[str, Any], rank: int) -> State:
    """A rank's own state, of what ``by_rank`` made."""
    return saved["distinct"][saved["by_rank"][rank]]


def _fingerprint(value: Any) -> bytes:
    if isinstance(value, torch.Tensor):
        return value.numpy().tobytes()
    if isinstance(value, dict | list):
        return b"|".join(map(_fingerprint, value.values() if isinstance(value, dict) else value))
    return repr(value).encode()
