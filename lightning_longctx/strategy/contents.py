"""What a batch says to the strategy: how it was cut, and which labels count."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_longctx.sequence.record import SequenceRecord

LABELS = "shift_labels"


@dataclass(frozen=True, eq=False)
class BatchContents:
    """Records and labels found in a batch; several if it holds several batches, as a ``CombinedLoader`` makes them.

    Args:
        batch: The arguments of the step.
        records: Every ``sequence`` entry.
    """

    batch: Any = ()
    records: tuple[SequenceRecord, ...] = ()

    @property
    def labels(self) -> tuple[Tensor, ...]:
        """Every ``shift_labels`` entry as it is now: hooks and the step itself may have masked more."""
        found = _entries("", self.batch)
        return tuple(value for key, value in found if key == LABELS and isinstance(value, Tensor))


def read_batch(batch: Any) -> BatchContents:
    """Walk through dicts, lists and tuples."""
    return BatchContents(batch, tuple(value for _, value in _entries("", batch) if isinstance(value, SequenceRecord)))


def let_records_pass(precision: Any) -> None:
    """Make a precision plugin leave records alone, once."""
    if "convert_input" not in vars(precision):
        precision.convert_input = convert_all_but_records(precision.convert_input)


def convert_all_but_records(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Let Lightning's conversion of a batch (to bfloat16, say) pass records by: it rejects a frozen dataclass."""

    def converted(batch: Any) -> Any:
        if isinstance(batch, SequenceRecord):
            return batch
        if isinstance(batch, dict):
            return {key: converted(value) for key, value in batch.items()}
        if isinstance(batch, Mapping):
            result: Any = copy(batch)
            for key, value in batch.items():
                result[key] = converted(value)
            return result
        if isinstance(batch, list | tuple):
            members = [converted(member) for member in batch]
            return type(batch)(*members) if hasattr(batch, "_fields") else type(batch)(members)
        return convert(batch)

    return converted


def _entries(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, member in value.items():
            yield from _entries(str(name), member)
    elif isinstance(value, list | tuple):
        for member in value:
            yield from _entries(key, member)
    elif isinstance(value, SequenceRecord | Tensor):
        yield key, value
