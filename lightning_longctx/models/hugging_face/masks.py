"""What the layers of a Hugging Face model see: the rules transformers would fill a dense mask by, read instead.

Transformers asks a function, by the name of the attention, to make the mask of each kind of layer. Without one it makes
none, and a causal model would be trained on keys that come later. Ours makes no mask either, but a note that says in
words what the mask would have said; the layers hand it on to attention. Positions of a shard do not count on where
pieces meet, which transformers takes for packed documents: that rule is left to the sequence record, which knows.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_longctx.sequence.record import SequenceRecord

_HOME = "transformers.masking_utils"
_CAUSAL = "causal_mask_function"
_WINDOW = "sliding_window_overlay.<locals>.inner_mask"
_PACKED = "packed_sequence_mask_function.<locals>.inner_mask"
_JOINTS = ("and_masks.<locals>.and_mask", "remap_positions_for_packed_sequence.<locals>.inner_mask")
"""Rules that are made of other rules, all of which must hold."""


@dataclass(frozen=True)
class ShardMask:
    """Stands where a layer would get its dense mask.

    Args:
        window: Most keys that a query sees, itself included; None is no limit. The mask is causal.
        sequence: The record of the model's tokens.
    """

    window: int | None
    sequence: SequenceRecord

    def __getitem__(self, index: Any) -> ShardMask:
        """Itself, for slices of everything; models cut their mask to the tokens whose logits they keep.

        Raises:
            ValueError: The index leaves something out.
        """
        for part in index if isinstance(index, tuple) else (index,):
            whole = isinstance(part, slice) and part.start in (None, 0) and part.stop is None and part.step in (None, 1)
            if not whole and part is not Ellipsis:
                raise ValueError(
                    f"a Hugging Face model takes a part of its mask ({part}), as for logits_to_keep. Over a sharded "
                    "sequence there is only the whole: leave it out, or train with context=1 and head=1."
                )
        return self


_open: list[Sequences] = []


@dataclass
class Sequences:
    """The sequences a step is about, and the one of the forward that runs: masks are made for that."""

    records: tuple[SequenceRecord, ...]
    current: SequenceRecord | None = None

    def __enter__(self) -> Sequences:
        _open.append(self)
        return self

    def __exit__(self, *exception: object) -> None:
        _open.remove(self)

    def fitting(self, num_tokens: int) -> SequenceRecord:
        """The record of which this rank holds that many tokens.

        Raises:
            ValueError: None, or more than one.
        """
        found = {record for record in self.records if record.num_local_tokens == num_tokens}
        if len(found) != 1:
            held = sorted({record.num_local_tokens for record in self.records})
            raise ValueError(
                f"a Hugging Face model got {num_tokens} tokens a row, but the batch's sequences have {held} on this "
                f"rank: {'more than one of them fits' if found else 'none fits'}. Pass the record of these tokens: "
                "model(..., sequence=batch['sequence'])."
            )
        return found.pop()


def shard_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    **others: Any,
) -> ShardMask:
    """The mask function that transformers calls; arguments as in its ``sdpa_mask``.

    Raises:
        ValueError: The mask has a rule that attention over ranks does not know.
    """
    record = _open[-1].current if _open else None
    if record is None:
        raise ValueError(
            "a part of a Hugging Face model was called by itself, so that it is not known which sequence its tokens "
            "belong to. Call the model (or its base model) with input_ids or inputs_embeds inside the step."
        )
    if attention_mask is not None:
        raise ValueError(
            "a Hugging Face model got attention_mask, which covers this rank's tokens only. Leave it out: padding at "
            "the end of rows needs no mask here, and the loader has taken it out of the labels. If you gave none, the "
            "model makes one itself and cannot be used over a sharded sequence: train it with context=1 and head=1."
        )
    if (q_length, q_offset) != (kv_length, kv_offset):
        raise ValueError(
            f"a Hugging Face model asks for a mask of {q_length} queries at {q_offset} and {kv_length} keys at "
            f"{kv_offset}: caches and cross-attention are not available over ranks. Train with context=1 and head=1."
        )
    rules = set(_rules(mask_function))
    if _CAUSAL not in rules or not rules <= {_CAUSAL, _WINDOW, _PACKED}:
        raise ValueError(
            "the mask of a Hugging Face model is made of other rules than causal, window and packed documents: "
            f"{', '.join(sorted(rules))}. Attention over ranks does not know them; train with context=1 and head=1."
        )
    return ShardMask(local_size if _WINDOW in rules else None, record)


def _rules(function: Callable[..., Any] | None) -> Iterator[str]:
    """Names of the rules that all must allow a pair; what is no rule of transformers goes by its full name."""
    name = getattr(function, "__qualname__", repr(function))
    if getattr(function, "__module__", None) != _HOME:
        yield f"{getattr(function, '__module__', '')}.{name}"
    elif name not in _JOINTS:
        yield name
    else:
        for value in inspect.getclosurevars(function).nonlocals.values():  # type: ignore[arg-type]
            for member in value if isinstance(value, tuple) else (value,):
                if callable(member):
                    yield from _rules(member)
