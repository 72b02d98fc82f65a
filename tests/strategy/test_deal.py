"""How samples go to data ranks, for every size."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

from lightning_longctx.strategy.samples.deal import Deal
from lightning_longctx.strategy.samples.orders import IndexOrder
from lightning_longctx.strategy.samples.samplers import DealtSampler

DEALS = st.builds(Deal, st.integers(0, 60), st.integers(1, 4), st.integers(1, 6), st.booleans())


def batches(deal: Deal, shuffle: bool = True, epoch: int = 0, first: int = 0) -> list[list[list[int]]]:
    """Of every rank, as a ``BatchSampler`` makes them."""
    made = []
    for rank in range(deal.num_ranks):
        sampler = DealtSampler(IndexOrder(deal.num_samples, shuffle, 3), deal, rank)
        sampler.continue_at(epoch, first)
        mine = list(sampler)
        assert first or len(mine) == len(sampler)
        size = deal.batch_size
        cut = [mine[at : at + size] for at in range(0, len(mine), size)]
        made.append([batch for batch in cut if not deal.drop_last or len(batch) == size])
    return made


def without_stand_ins(deal: Deal, made: list[list[list[int]]]) -> list[list[list[int]]]:
    return [rank[:-1] if deal.has_stand_in(place) else rank for place, rank in enumerate(made)]


@given(DEALS, st.booleans())
def test_every_sample_counts_once_and_ranks_take_the_same_steps(deal: Deal, shuffle: bool) -> None:
    made = batches(deal, shuffle)
    assert {len(rank) for rank in made} == {deal.num_batches}
    counted = Counter(index for rank in without_stand_ins(deal, made) for batch in rank for index in batch)
    assert set(counted.values()) <= {1}
    kept = deal.num_samples // deal.global_batch * deal.global_batch if deal.drop_last else deal.num_samples
    assert len(counted) == kept
    assert deal.needs_stand_ins == any(deal.has_stand_in(rank) for rank in range(deal.num_ranks))


@given(DEALS, st.integers(0, 20))
def test_the_first_batches_are_the_first_positions_whatever_the_ranks(deal: Deal, number: int) -> None:
    number = min(number, deal.num_batches)
    order = IndexOrder(deal.num_samples, True, 3).take(0, range(deal.num_samples))
    made = without_stand_ins(deal, batches(deal))
    found = {index for rank in made for batch in rank[:number] for index in batch}
    assert found == set(order[: deal.start_of_batch(number)])


@given(DEALS, st.integers(1, 6), st.integers(0, 20))
def test_other_ranks_continue_without_a_repeat_or_a_gap(deal: Deal, ranks: int, number: int) -> None:
    if deal.global_batch % ranks:
        return
    there = Deal(deal.num_samples, deal.global_batch // ranks, ranks, deal.drop_last)
    number = min(number, deal.num_batches)
    assert there.num_batches == deal.num_batches
    assert there.batch_at(deal.start_of_batch(number)) == number
    before = [index for rank in without_stand_ins(deal, batches(deal)) for batch in rank[:number] for index in batch]
    after = batches(there, first=number)
    if number < there.num_batches:
        after = without_stand_ins(there, after)
    after = [index for rank in after for batch in rank for index in batch]
    assert sorted(before + after) == sorted(i for r in without_stand_ins(deal, batches(deal)) for b in r for i in b)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("epoch", [0, 5])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_the_order_is_that_of_a_distributed_sampler(shuffle: bool, epoch: int, num_ranks: int) -> None:
    for rank in range(num_ranks):
        theirs = DistributedSampler(range(12), num_ranks, rank, shuffle=shuffle, seed=7)  # type: ignore[arg-type]
        ours = DealtSampler(IndexOrder(12, shuffle, 7), Deal(12, 1, num_ranks), rank)
        theirs.set_epoch(epoch)
        ours.set_epoch(epoch)
        assert list(ours) == list(theirs)


def test_no_batch_begins_inside_a_global_batch() -> None:
    deal = Deal(20, 2, 2)
    assert [deal.batch_at(position) for position in (0, 8, 20)] == [0, 2, 5]
    with pytest.raises(ValueError, match=r"position 6 .* global batch of 4 samples \(batch_size=2 x 2 data ranks\)"):
        deal.batch_at(6)
    with pytest.raises(ValueError, match="not positive"):
        Deal(3, 0)
