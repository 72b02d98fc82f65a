"""Which keys a query may see, as numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mask:
    """A mask that depends on positions alone.

    Args:
        causal: A query sees keys at its own and earlier positions only.
        window: A query sees at most this many keys, itself included; needs ``causal``. None is no limit.
        isolate: Packed documents do not see each other.

    Raises:
        ValueError: ``window`` is not positive, or given without ``causal``.
    """

    causal: bool = True
    window: int | None = None
    isolate: bool = True

    def __post_init__(self) -> None:
        if self.window is not None and (self.window < 1 or not self.causal):
            raise ValueError(f"window={self.window} must be at least 1 (the query itself) and needs causal=True.")

    def allows(self, query: int, key: int) -> bool:
        """Whether a query sees a key of its own document, by global positions: what all plans are held to."""
        return (not self.causal or key <= query) and (self.window is None or query - key < self.window)


CAUSAL = Mask()
