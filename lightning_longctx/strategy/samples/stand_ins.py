"""The last batch of an epoch on data ranks that have no sample left for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_longctx.batch.stand_in import is_labelled, without_labels
from lightning_longctx.strategy.samples.around import LoaderAround
from lightning_longctx.strategy.samples.samplers import DealtSampler


class StandInLoader(LoaderAround):
    """A loader over a ``DealtSampler`` whose last batch has no sample for some data ranks.

    All ranks must take a step together, so those run one sample once more, without its labels: no sample counts twice.

    Args:
        loader: A ``DataLoader`` whose batches are cut.
        sampler: Its sampler.
    """

    def __init__(self, loader: Any, sampler: DealtSampler) -> None:
        super().__init__(loader, _dealt=sampler, _warned=False)

    def __iter__(self) -> Iterator[Any]:
        """Batches, of which the last may be a stand-in.

        Raises:
            ValueError: Batches have no labels to leave out. Raised with the first batch, on every rank.
        """
        deal, rank, batches = self._dealt.deal, self._dealt.rank, iter(self.loader)
        number: int | None = None
        for batch in batches:
            number = self._dealt.first_batch if number is None else number + 1
            if not is_labelled(batch):
                raise ValueError(
                    f"the last batch of {deal.num_samples} samples gives {deal.num_ranks} data ranks of "
                    f"batch_size={deal.batch_size} no sample for each, and without labels in the batch a repeated "
                    "sample cannot be left out of means and gradients. Set drop_last=True, use a number of samples "
                    f"that {deal.num_ranks} divides, put labels into the batch, or set data=1."
                )
            if number < deal.num_batches - 1:
                yield batch
                continue
            self._warn()
            yield without_labels(batch) if deal.has_stand_in(rank) else batch

    def _warn(self) -> None:
        if not self._warned:
            self._warned = True
            deal = self._dealt.deal
            absent = sum(deal.has_stand_in(rank) for rank in range(deal.num_ranks))
            rank_zero_warn(
                f"the last batch of {deal.num_samples} samples has none for {absent} of {deal.num_ranks} data ranks, "
                "which run one without labels instead. Losses over labels and self.log_tokens are exact; a plain "
                "self.log counts that batch too, or is NaN there."
            )
