"""Samples as a map-style dataset, and how samples of different lengths become a batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from lightning_longctx.data.cache import TokenStore
from lightning_longctx.data.packing import Packing
from lightning_longctx.sequence.documents import document_positions

Sample = dict[str, Tensor]

IGNORED_LABEL = -100


class PackedDataset(Dataset[Sample]):
    """Samples of a token store.

    A sample has ``input_ids`` and ``labels``, both int64 [S] and equal: labels are shifted later, on the whole
    sequence, where the last token of one shard can meet the first of the next. Where the packing keeps documents apart,
    it also has ``position_ids`` int64 [S], which restart with every document.

    Args:
        store: Tokens.
        packing: Which tokens make up each sample.
    """

    def __init__(self, store: TokenStore, packing: Packing) -> None:
        self.store = store
        self.packing = packing

    def __len__(self) -> int:
        return len(self.packing)

    def __getitem__(self, index: int) -> Sample:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        pieces = self.packing.pieces(index % len(self))
        tokens = np.concatenate([self.store.tokens[piece.start : piece.stop] for piece in pieces])
        input_ids = torch.from_numpy(tokens.astype(np.int64))
        sample = {"input_ids": input_ids, "labels": input_ids.clone()}
        if self.packing.isolated:
            sample["position_ids"] = torch.from_numpy(document_positions([len(piece) for piece in pieces]))
        return sample


@dataclass(frozen=True)
class PadCollate:
    """Stack samples, padded at their ends to the longest; padding has the label -100.

    Args:
        pad_id: Token id of padding. Under causal attention no real token sees it.
    """

    pad_id: int

    def __call__(self, samples: list[Sample]) -> Sample:
        """``input_ids`` and ``labels`` [B, S] of the longest sample."""
        filler = {"input_ids": self.pad_id, "labels": IGNORED_LABEL}
        return {
            name: pad_sequence([sample[name] for sample in samples], batch_first=True, padding_value=value)
            for name, value in filler.items()
        }
