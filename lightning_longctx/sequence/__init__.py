"""Where every token lives: layouts and the record a batch carries."""

from lightning_longctx.sequence.documents import Documents
from lightning_longctx.sequence.layout import LAYOUTS, LayoutName, layout_ranges, padded_length, padding_multiple
from lightning_longctx.sequence.ranges import Ranges
from lightning_longctx.sequence.record import SequenceRecord

__all__ = [
    "LAYOUTS",
    "Documents",
    "LayoutName",
    "Ranges",
    "SequenceRecord",
    "layout_ranges",
    "padded_length",
    "padding_multiple",
]
