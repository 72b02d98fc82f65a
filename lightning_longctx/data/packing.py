"""How documents become samples of a fixed length: pure arithmetic on spans of the token file."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

PackingName = Literal["concat", "packed", "document"]
PACKINGS: tuple[str, ...] = get_args(PackingName)

Spans = NDArray[np.int64]
"""Documents as [n, 2]: start and stop of each in the token file, its end-of-document token included."""

MIN_SAMPLE_TOKENS = 2
"""One token has nothing to predict."""


class Packing(Protocol):
    """Samples as spans of the token file."""

    @property
    def isolated(self) -> bool:
        """Whether pieces of a sample are documents that must not see each other."""
        ...

    def __len__(self) -> int:
        """Number of samples."""
        ...

    def pieces(self, index: int) -> list[range]:
        """Ranges of the token file that make up a sample, in order."""
        ...


@dataclass(frozen=True)
class ConcatPacking:
    """All documents end to end, cut into windows of exactly ``seq_len`` tokens; what is left at the end is dropped.

    Args:
        spans: Documents in the order in which they are joined.
        seq_len: Tokens of a sample.
        isolated: Whether documents in the same window are kept apart.
    """

    spans: Spans
    seq_len: int
    isolated: bool = False
    ends: NDArray[np.int64] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ends", np.cumsum(self.spans[:, 1] - self.spans[:, 0]))

    def __len__(self) -> int:
        return int(self.ends[-1]) // self.seq_len if len(self.ends) else 0

    def pieces(self, index: int) -> list[range]:
        """Ranges of the token file that make up window ``index``."""
        low, high = index * self.seq_len, (index + 1) * self.seq_len
        first, last = np.searchsorted(self.ends, (low, high - 1), side="right")
        found = []
        for (start, stop), end in zip(self.spans[first : last + 1].tolist(), self.ends[first:].tolist(), strict=False):
            offset = stop - end  # from a place in the joined documents to one in the token file
            found.append(range(max(start, low + offset), min(stop, high + offset)))
        return found


@dataclass(frozen=True)
class DocumentPacking:
    """Every document by itself, cut into samples of at most ``seq_len`` tokens; single tokens are dropped.

    Args:
        spans: Documents.
        seq_len: Most tokens of a sample.
        isolated: False: no sample has a second document.
    """

    spans: Spans
    seq_len: int
    isolated: bool = field(default=False, init=False)
    ends: NDArray[np.int64] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        tokens = self.spans[:, 1] - self.spans[:, 0]
        # A remainder of one token has nothing to predict and makes no sample.
        object.__setattr__(self, "ends", np.cumsum((tokens + self.seq_len - MIN_SAMPLE_TOKENS) // self.seq_len))

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def pieces(self, index: int) -> list[range]:
        """The one range of the token file that is sample ``index``."""
        document = int(np.searchsorted(self.ends, index, side="right"))
        before = int(self.ends[document - 1]) if document else 0
        start, stop = self.spans[document].tolist()
        start += (index - before) * self.seq_len
        return [range(start, min(start + self.seq_len, stop))]


def pack(packing: PackingName, spans: Spans, seq_len: int) -> Packing:
    """Samples of documents; arguments as in ``check_packing``."""
    check_packing(packing, seq_len)
    if packing == "document":
        return DocumentPacking(spans, seq_len)
    return ConcatPacking(spans, seq_len, isolated=packing == "packed")


def check_packing(packing: PackingName, seq_len: int) -> None:
    """Check options before there are documents.

    Raises:
        ValueError: ``packing`` is unknown, or a sample of ``seq_len`` tokens would have nothing to predict.
    """
    if seq_len < MIN_SAMPLE_TOKENS:
        raise ValueError(f"seq_len={seq_len} leaves nothing to predict. Use seq_len={MIN_SAMPLE_TOKENS} or more.")
    if packing not in PACKINGS:
        raise ValueError(f"packing={packing!r} is unknown; choose one of {PACKINGS}.")
