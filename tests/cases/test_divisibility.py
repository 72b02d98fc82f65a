"""Lengths that do not divide: padded by the right factor where shards must be even, and the same numbers either way."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from lightning_longctx import Degrees
from lightning_longctx.attention import close_ring, open_ring
from lightning_longctx.batch import ShardCollate, Sharding
from lightning_longctx.loss import token_cross_entropy
from lightning_longctx.models import Decoder
from lightning_longctx.sequence import LAYOUTS, layout_ranges, padded_length, padding_multiple
from lightning_longctx.sequence.ranges import zigzag_chunks
from tests.cases.tiny import (
    LEARNING_RATE,
    TINY,
    Gradients,
    assert_equal_numbers,
    make_trainer,
    named_weights,
    tiny_decoder,
    tiny_module,
    token_losses,
)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("context", [1, 2, 3, 4])
@pytest.mark.parametrize("inside", [(1, 1), (1, 2), (2, 1), (1, 3), (1, 4), (2, 3)])
def test_the_factor_is_the_least_that_makes_all_pieces_even(layout: Any, context: int, inside: tuple[int, int]) -> None:
    """B19: its multiples are exactly the lengths whose shards divide, and whose zigzag chunks are alike."""
    head, tensor = inside

    def even(length: int) -> bool:
        sizes = [[len(piece) for piece in shard] for shard in layout_ranges(layout, length, context)]
        chunks = {len(chunk) for shard in zigzag_chunks(range(length), context) for chunk in shard}
        alike = layout != "zigzag" or (len(chunks) == 1 and 0 not in chunks)
        totals = {sum(shard) for shard in sizes}
        return alike and len(totals) == 1 and totals.pop() % (head * tensor) == 0

    multiple = padding_multiple(layout, context, head, tensor)
    assert [length for length in range(1, 100) if even(length)] == list(range(multiple, 100, multiple))
    for length in range(1, 100):
        padded = padded_length(length, multiple)
        assert even(padded) and length <= padded < length + multiple


def rows(length: int) -> list[dict[str, Tensor]]:
    """Two sequences in which every label counts."""
    tokens = torch.randint(TINY.vocab_size, (2, length), generator=torch.Generator().manual_seed(length))
    return [{"input_ids": row, "labels": row.clone()} for row in tokens]


def padded_step(degrees: Degrees, layout: Any, length: int, multiple: int) -> tuple[int, float, dict[str, Tensor]]:
    """Padded length, loss and gradients over all ranks, from a batch padded and cut by the loader's collate step."""
    rank = dist.get_rank()
    ring = open_ring(degrees, rank, timedelta(seconds=60))
    sharding = Sharding(layout, degrees.context, degrees.inner, rank, multiple, ring, pad_values=(("input_ids", 7),))
    batch = ShardCollate(default_collate, sharding)(rows(length))
    torch.manual_seed(0)
    decoder = Decoder(TINY)
    logits = decoder(batch["input_ids"], batch["position_ids"], batch["sequence"])
    total, count = token_cross_entropy(logits, batch["shift_labels"])
    assert batch["sequence"].num_valid_tokens == 2 * (length - 1)
    (total / batch["sequence"].num_valid_tokens).backward()
    sums = [total.detach() / batch["sequence"].num_valid_tokens, *(weight.grad for weight in decoder.parameters())]
    for each in sums:
        dist.all_reduce(each)
    dist.all_reduce(count)
    assert count == batch["sequence"].num_valid_tokens
    close_ring(ring)
    names = [name for name, _ in decoder.named_parameters()]
    return batch["sequence"].length, sums[0].item(), dict(zip(names, sums[1:], strict=True))


def by_hand(length: int) -> tuple[float, dict[str, Tensor]]:
    decoder = tiny_decoder()
    loss = token_losses(decoder, rows(length)).mean()
    loss.backward()
    return loss.item(), {name: weight.grad for name, weight in decoder.named_parameters()}  # type: ignore[misc]


@pytest.mark.parametrize(
    ("degrees", "layout", "length", "multiple"),
    [
        (Degrees(1, 2), "zigzag", 10, 4),
        (Degrees(1, 2), "zigzag", 12, 8),
        (Degrees(1, 2), "contiguous", 3, 16),  # the second rank holds nothing but padding
        (Degrees(1, 4, 2), "zigzag", 10, 8),
        (Degrees(1, 4), "striped", 9, 12),
    ],
)
def test_padding_changes_no_number(gloo: Any, degrees: Degrees, layout: str, length: int, multiple: int) -> None:
    """B19: padding has no label, is seen by no token that counts, and is not counted."""
    loss, grads = by_hand(length)
    for padded, found, found_grads in gloo(degrees.context).run(padded_step, degrees, layout, length, multiple):
        assert padded == padded_length(length, multiple) > length
        assert found == pytest.approx(loss, abs=1e-5)
        assert_equal_numbers(found_grads, grads)


def train(degrees: Degrees, layout: str, lengths: list[int]) -> list[tuple[float, Any, Any]]:
    results = []
    for length in lengths:
        gradients, module = Gradients(), tiny_module()
        trainer = make_trainer(degrees, layout, callbacks=[gradients])
        trainer.fit(module, DataLoader(rows(length), batch_size=2))  # type: ignore[arg-type]
        results.append((float(trainer.callback_metrics["train_loss"]), gradients.steps[0], named_weights(module)))
    return results


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("degrees", [Degrees(1, 2), Degrees(1, 4), Degrees(1, 4, 2)])
def test_any_length_trains_as_in_one_process(gloo: Any, degrees: Degrees, layout: str) -> None:
    """B19: 10 tokens over 2 ranks, and lengths that leave ranks with one token more, or with none."""
    lengths = [10, 13, 5, 2]
    for results in gloo(degrees.context).run(train, degrees, layout, lengths):
        for length, (found, found_grads, found_weights) in zip(lengths, results, strict=True):
            loss, grads = by_hand(length)
            assert found == pytest.approx(loss, abs=1e-5)
            grads = {f"decoder.{name}": grad for name, grad in grads.items()}
            start = {f"decoder.{name}": weight.detach() for name, weight in tiny_decoder().named_parameters()}
            assert_equal_numbers(found_grads, grads)
            assert_equal_numbers(found_weights, {name: start[name] - LEARNING_RATE * grads[name] for name in grads})
