"""Numbers that do not fit are refused when something is made of them, by every rank, before any talks to another."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from lightning_longctx import CausalLM, Degrees, LongContextStrategy
from lightning_longctx.models import DecoderConfig
from tests.cases.tiny import QUIET, TINY, make_trainer, samples


@pytest.mark.parametrize(
    ("degrees", "heads", "message"),
    [
        (
            dict(tensor=4),
            (8, 2),
            r"tensor=4 does not fit 8 .* and 2 .*: it must divide both. Use tensor=1 or 2\.",
        ),
        (
            dict(head=4),
            (6, 6),
            r"head=4 does not fit 6 query heads and 6 key.* Use head=1 or 2 or 3 or 6\.",
        ),
        (dict(head=4), (6, 2), r"head=4 does not fit 6 query heads and 2 .* Use head=1 or 2 or 6\."),
        (dict(head=12), (16, 8), r"divide 16, and divide 8 or be a multiple of it. Use head=1 or 2 or 4 or 8 or 16\."),
        (dict(head=3, tensor=2), (8, 8), r"head=3 does not fit 4 query heads and 4 .* Use head=1 or 2 or 4\."),
        (dict(tensor=3, head=2), (8, 8), r"tensor=3 does not fit 8 query heads"),
    ],
)
def test_degrees_that_do_not_fit_the_heads(degrees: dict[str, int], heads: tuple[int, int], message: str) -> None:
    """B46: option, value and the values that would fit."""
    with pytest.raises(ValueError, match=message):
        Degrees(**degrees).check_heads(*heads)


@pytest.mark.parametrize(
    ("degrees", "heads"),
    [
        (dict(tensor=2), (8, 2)),
        (dict(head=4), (8, 2)),
        (dict(head=8), (8, 2)),
        (dict(head=3), (6, 6)),
        (dict(head=6), (6, 2)),
        (dict(head=2, tensor=2), (8, 2)),
        (dict(head=2, tensor=2), (8, 4)),
        (dict(head=1), (6, 1)),
    ],
)
def test_neighbours_that_fit(degrees: dict[str, int], heads: tuple[int, int]) -> None:
    """B46: nothing that works is refused."""
    Degrees(**degrees).check_heads(*heads)


def test_the_rule_of_heads_by_definition() -> None:
    """B46: tensor ranks need whole query and key/value heads; head ranks may share a key/value head, evenly."""
    for tensor, head, num_heads, num_kv_heads in product((1, 2, 3, 4), (1, 2, 3, 4, 6, 8), (4, 6, 8, 12), (1, 2, 4, 6)):
        if num_heads % num_kv_heads:
            continue
        local, local_kv = num_heads / tensor, num_kv_heads / tensor
        fits = local == int(local) and local_kv == int(local_kv) and local % head == 0
        fits = fits and (local_kv % head == 0 or head % local_kv == 0)
        if fits:
            Degrees(head=head, tensor=tensor).check_heads(num_heads, num_kv_heads)
        else:
            with pytest.raises(ValueError, match=rf"(head={head}|tensor={tensor}) does not fit .* Use (head|tensor)=1"):
                Degrees(head=head, tensor=tensor).check_heads(num_heads, num_kv_heads)


WRONG = [
    (dict(context=3), ["context=3", "4 processes", "trainer.devices"]),
    (dict(data=3), ["data=3", "4 processes", "data=auto"]),
    (dict(data=4, context=2), ["data=4", "context=2", "= 8", "4 processes"]),
    (dict(context=8, inner_ring=2), ["context=8", "4 processes"]),
    (dict(context=4, inner_ring=3), ["inner_ring=3", "context=4", "[1, 2, 4]"]),
    (dict(context=2, inner_ring=4), ["inner_ring=4", "context=2", "[1, 2]"]),
    (dict(context=0), ["context=0", "positive integer"]),
    (dict(context=2.0), ["context=2.0", "positive integer"]),
    (dict(context="2"), ["context='2'", "positive integer"]),
    (dict(data=True), ["data=True", "positive integer"]),
    (dict(context=2, head=4), ["context=2", "head=4", "= 8", "4 processes"]),
    (dict(head=0), ["head=0", "positive integer"]),
    (dict(head=2, placement="ring_first"), ["placement='ring_first'", "head_first", "context_first"]),
    (dict(context=2, tensor=4), ["context=2", "tensor=4", "= 8", "4 processes"]),
]
RIGHT = [
    dict(),
    dict(context=2),
    dict(context=4),
    dict(context=4, inner_ring=2),
    dict(context=4, inner_ring=1),
    dict(data=2, context=2),
    dict(data=1, context=4, inner_ring=4),
    dict(data=4),
    dict(head=4),
    dict(context=2, head=2),
    dict(context=2, head=2, placement="context_first"),
    dict(tensor=4),
    dict(context=2, tensor=2),
]


def made(options: dict[str, Any], only_rank: int | None) -> str | tuple[int, ...] | None:
    """The message of the error, or the shape of the mesh. Where a collective is hidden in it, one rank alone hangs."""
    if only_rank is not None and dist.get_rank() != only_rank:
        return None
    try:
        strategy = LongContextStrategy(Degrees(**options))
        Trainer(strategy=strategy, devices=4, **QUIET)
        return strategy.degrees.shape
    except ValueError as error:
        return str(error)


def all_made(only_rank: int | None) -> list[Any]:
    return [made(options, only_rank) for options in [*(options for options, _ in WRONG), *RIGHT]]


@pytest.mark.parametrize("only_rank", [None, 0, 3])
def test_wrong_degrees_are_refused_by_every_rank_by_itself(gloo: Any, only_rank: int | None) -> None:
    """B46: at construction of the strategy or the Trainer, the same words on all ranks; right neighbours pass."""
    by_rank = gloo(4).run(all_made, only_rank, timeout=60)
    for found in by_rank if only_rank is None else [by_rank[only_rank]]:
        for (options, parts), message in zip(WRONG, found, strict=False):
            assert isinstance(message, str) and all(part in message for part in parts), (options, message)
        for options, shape in zip(RIGHT, found[len(WRONG) :], strict=True):
            assert isinstance(shape, tuple), (options, shape)
            assert math.prod(shape) == 4
        if only_rank is None:
            assert found == by_rank[0]


def run_with(degrees: Degrees) -> str:
    with pytest.raises(ValueError) as refused:
        make_trainer(degrees).fit(CausalLM(TINY), DataLoader(samples(1)))  # type: ignore[arg-type]
    return str(refused.value)


def test_a_run_checks_the_heads_of_its_model(gloo: Any) -> None:
    """B46: 4 query heads and 2 key/value heads cannot be shared by four tensor ranks; every rank says so."""
    for message in gloo(4).run(run_with, Degrees(tensor=4)):
        assert message.startswith("tensor=4 does not fit 4 query heads and 2 key/value heads")


def test_heads_of_the_model_are_checked_when_it_is_described() -> None:
    """B46: a decoder's own head counts."""
    with pytest.raises(ValueError, match="num_kv_heads=3 does not divide num_heads=8.*num_kv_heads=1 or 2 or 4 or 8"):
        DecoderConfig(num_heads=8, num_kv_heads=3)
    for num_kv_heads in (1, 2, 4, 8, None):
        DecoderConfig(num_heads=8, num_kv_heads=num_kv_heads)
