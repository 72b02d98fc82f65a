"""Random tokens, in sequences whose length may change from one step to the next."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

NUM_SAMPLES = 65536
"""Of an epoch; a bench ends long before."""


class RandomTokens(Dataset[dict[str, Tensor]]):
    """Samples with ``input_ids`` and ``labels``, int64 [tokens] and equal; the same for every rank that asks.

    Args:
        vocab_size: Number of token ids.
        tokens: Length of the next sample; may be set at any time.
    """

    def __init__(self, vocab_size: int, tokens: int) -> None:
        self.vocab_size = vocab_size
        self.tokens = tokens

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(self.vocab_size, (self.tokens,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids.clone()}


class RandomTokenData(LightningDataModule):
    """One random sample a step and data rank.

    The dataset has a length and no workers, so that a batch is made when its step begins and no earlier: what was set
    after the step before counts.

    Args:
        dataset: The samples.
    """

    def __init__(self, dataset: RandomTokens) -> None:
        super().__init__()
        self.dataset = dataset

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self.dataset.vocab_size

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """The samples, one a batch."""
        return DataLoader(self.dataset, batch_size=1)
