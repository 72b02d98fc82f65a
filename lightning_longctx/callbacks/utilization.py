"""Model FLOPs utilisation (PaLM, arXiv 2204.02311): the work of a model over what devices could do in the time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import nn

from lightning_longctx.plan.mask import Mask
from lightning_longctx.sequence.record import SequenceRecord


@dataclass(frozen=True)
class ModelWork:
    """What decides how many FLOPs a token costs, forward and backward, nothing recomputed.

    Args:
        num_parameters: That every token is multiplied with: 6 FLOPs each.
        num_heads: Query heads of a layer.
        head_width: Width of one.
        masks: The mask of every layer: 12 FLOPs for a pair of query and key, head and channel.
    """

    num_parameters: int
    num_heads: int
    head_width: int
    masks: tuple[Mask, ...]

    def flops(self, lengths: Iterable[int]) -> float:
        """Of documents of these lengths in tokens, each seeing itself only."""
        pair, total = 12 * self.num_heads * self.head_width, 0.0
        for length in lengths:
            total += 6 * self.num_parameters * length
            total += pair * sum(visible_pairs(length, mask) for mask in self.masks)
        return total

    def flops_per_token(self, lengths: Sequence[int]) -> float:
        """The mean over all tokens of such documents."""
        return self.flops(lengths) / sum(lengths)


def visible_pairs(length: int, mask: Mask) -> float:
    """Pairs of query and key that a document has, by the usual convention: half of the square if it is causal."""
    if not mask.causal:
        return float(length**2)
    if mask.window is None or mask.window >= length:
        return length**2 / 2
    return mask.window * length - mask.window**2 / 2


def model_work(module: Any) -> ModelWork:
    """What a module says of itself.

    Args:
        module: Has ``attention_heads`` (query heads, key/value heads), ``attention_head_width`` and
            ``attention_masks``, one for every layer, as ``CausalLM`` and ``HuggingFaceModule`` do.

    Raises:
        ValueError: It does not say it.
    """
    heads, width = getattr(module, "attention_heads", None), getattr(module, "attention_head_width", None)
    masks = getattr(module, "attention_masks", None)
    if not heads or not width or not masks:
        raise ValueError(
            f"peak_flops is set, but {type(module).__name__} does not say what its attention costs. Give it the "
            "properties attention_heads (query heads, key/value heads), attention_head_width and attention_masks (one "
            "for every layer), or leave peak_flops out."
        )
    return ModelWork(num_multiplied(module), heads[0], width, tuple(masks))


def num_multiplied(module: nn.Module) -> int:
    """Parameters that tokens are multiplied with: all but those of embeddings, which are looked up, unless tied."""
    looked_up = {id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding)}
    elsewhere = {
        id(weight)
        for part in module.modules()
        if not isinstance(part, nn.Embedding)
        for weight in part.parameters(recurse=False)
    }
    tied = getattr(getattr(module, "config", None), "tie_embeddings", False)  # of our decoder, which has one place
    skipped = set() if tied else looked_up - elsewhere
    return sum(weight.numel() for weight in module.parameters() if id(weight) not in skipped)


def document_lengths(record: SequenceRecord, num_rows: int) -> list[int]:
    """Lengths of all documents of a batch of ``num_rows`` rows, padding included: it is work too."""
    lengths = [stop - start for start, stop in pairwise(record.documents)] or [record.length]
    return lengths if record.num_rows > 1 else lengths * num_rows


def utilization(flops: float, seconds: float, num_devices: int, peak_flops: float) -> float:
    """Share of what ``num_devices`` devices of ``peak_flops`` FLOPs per second each could have done."""
    return flops / seconds / (num_devices * peak_flops)
