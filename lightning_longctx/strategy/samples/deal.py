"""How one epoch's samples go to data ranks. Pure: the same answer on every rank, tested without processes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Deal:
    """One global order of samples, dealt like cards: position ``p`` goes to data rank ``p % num_ranks``.

    So the first ``k`` batches of all data ranks together are the first ``k * global_batch`` positions, however many
    ranks share them; a stream can be continued by other ranks from there.

    Args:
        num_samples: Samples in the order (batches, if a batch sampler of the user's makes them).
        batch_size: Samples in a batch of one data rank.
        num_ranks: Data ranks.
        drop_last: Leave out the samples that fill no batch of all ranks. Otherwise they make a last batch that is
            smaller on some ranks; ranks that get none of them run a stand-in, which counts nowhere.

    Raises:
        ValueError: A size is not positive (``num_samples`` may be 0).
    """

    num_samples: int
    batch_size: int = 1
    num_ranks: int = 1
    drop_last: bool = False

    def __post_init__(self) -> None:
        if self.num_samples < 0 or self.batch_size < 1 or self.num_ranks < 1:
            raise ValueError(f"{self} has a size that is not positive.")

    @property
    def global_batch(self) -> int:
        """Samples in a batch of all data ranks."""
        return self.batch_size * self.num_ranks

    @property
    def num_dealt(self) -> int:
        """Positions that are dealt in an epoch: each once."""
        return self.num_samples - (self.num_samples % self.global_batch if self.drop_last else 0)

    @property
    def num_batches(self) -> int:
        """Batches of an epoch, the same on all ranks."""
        return -(-self.num_dealt // self.global_batch)

    @property
    def needs_stand_ins(self) -> bool:
        """Whether some ranks have no sample left in the last batch."""
        return 0 < self.num_dealt % self.global_batch < self.num_ranks

    def has_stand_in(self, rank: int) -> bool:
        """Whether ``rank`` is one of them."""
        return self.needs_stand_ins and rank >= self.num_dealt % self.global_batch

    def positions(self, rank: int, start: int = 0) -> range:
        """Positions of a rank in an epoch that begins at position ``start``, a multiple of ``num_ranks``."""
        return range(start + rank, self.num_dealt, self.num_ranks)

    def stand_in(self, rank: int) -> int:
        """The position whose sample ``rank`` repeats in the last batch: the order goes on from its beginning."""
        return ((self.num_batches - 1) * self.global_batch + rank) % self.num_samples

    def start_of_batch(self, number: int) -> int:
        """Position at which batch ``number`` of all ranks begins; at most ``num_dealt``."""
        return min(number * self.global_batch, self.num_dealt)

    def batch_at(self, position: int) -> int:
        """Inverse of ``start_of_batch``.

        Raises:
            ValueError: No batch begins there.
        """
        if position >= self.num_dealt:
            return self.num_batches
        number, rest = divmod(position, self.global_batch)
        if rest:
            raise ValueError(
                f"position {position} of the epoch is no multiple of the global batch of {self.global_batch} samples "
                f"(batch_size={self.batch_size} x {self.num_ranks} data ranks): no batch begins there."
            )
        return number
