"""Long documents for a language model, ready for a ``Trainer``."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only
from torch.utils.data import DataLoader

from lightning_longctx.data.cache import TokenStore, default_cache_dir, open_store, prepare_store
from lightning_longctx.data.corpus import Corpus, folder_or_file, standard_library
from lightning_longctx.data.packing import Packing, PackingName, Spans, check_packing, pack
from lightning_longctx.data.samples import PackedDataset, PadCollate, Sample
from lightning_longctx.data.split import Split, split_documents
from lightning_longctx.data.statistics import count_tokens, entropy
from lightning_longctx.data.tokenizer import ByteTokenizer, Tokenizer


class TextDataModule(LightningDataModule):
    """Text files as training and validation samples of a fixed number of tokens.

    The corpus is tokenized once and kept as a memory map in ``cache_dir``, under the hash of its files and tokenizer.
    Whole documents train or validate, by the hash of their names; test and predict read the validation documents.

    Args:
        path: Folder of text files (one document each), or of ``.jsonl`` files (one document a line, in the field
            ``text``), or one such file. ``null`` is the source of the running interpreter's standard library.
        tokenizer: Turns text into ids: ``lightning_longctx.data.PretrainedTokenizer`` as the files of a pretrained
            model say. ``null`` is one token per byte, vocabulary 257.
        seq_len: Tokens of a sample.
        batch_size: Samples of a batch.
        packing: ``concat`` joins documents and cuts the stream in windows of ``seq_len``, so that a token sees the
            documents before its own in the same window; ``packed`` cuts the same windows, but keeps their documents
            apart: positions restart with each, tokens see their own document only, and none predicts the next one's
            first token; ``document`` puts (part of) one document in each sample and pads the samples of a batch to the
            longest.
        validation_fraction: Expected share of documents that validate; 0 trains on all and validates on none.
        max_documents: Use at most so many documents, validation included. The cache holds all of them anyway.
        max_tokens: Use at most so many tokens, validation included.
        cache_dir: Where tokens are kept. ``null`` is ``lightning_longctx`` in the user's cache folder.
        num_workers: Worker processes of each loader.
        seed: Chooses the validation documents, what limits keep, and the order of packing.

    Raises:
        ValueError: An option is out of range.
    """

    def __init__(
        self,
        path: str | None = None,
        tokenizer: Tokenizer | None = None,
        seq_len: int = 4096,
        batch_size: int = 1,
        packing: PackingName = "concat",
        validation_fraction: float = 0.05,
        max_documents: int | None = None,
        max_tokens: int | None = None,
        cache_dir: str | None = None,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        for name, value in (("batch_size", batch_size), ("max_documents", max_documents), ("max_tokens", max_tokens)):
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1.")
        if num_workers < 0:
            raise ValueError(f"num_workers={num_workers} must be at least 0.")
        if not 0 <= validation_fraction < 1:
            raise ValueError(f"validation_fraction={validation_fraction} must be at least 0 and below 1.")
        check_packing(packing, seq_len)
        self.path = path
        self.tokenizer = ByteTokenizer() if tokenizer is None else tokenizer
        self.seq_len = seq_len
        self.batch_size = batch_size
        self.packing: PackingName = packing
        self.validation_fraction = validation_fraction
        self.max_documents = max_documents
        self.max_tokens = max_tokens
        self.cache_dir = default_cache_dir() if cache_dir is None else Path(cache_dir).expanduser()
        self.num_workers = num_workers
        self.seed = seed
        self._datasets: dict[str, PackedDataset] = {}

    @property
    def vocab_size(self) -> int:
        """Number of token ids: what the model must know."""
        return self.tokenizer.vocab_size

    def prepare_data(self) -> None:
        """Tokenize the corpus unless the cache has it; Lightning calls this in one process of each node."""
        prepare_store(self._corpus(), self.tokenizer, self.cache_dir)

    def setup(self, stage: str | None = None) -> None:
        """Map the tokens and lay out the samples, once for all stages.

        Raises:
            ValueError: Too few documents or tokens for a training or a validation sample; says which option to change.
        """
        if self._datasets:
            return
        split = self._split
        self._datasets = {"train": self._samples("training", split.train)}
        if self.validation_fraction:
            self._datasets["validation"] = self._samples("validation", split.validation)
        self._announce(split)

    def train_dataloader(self) -> DataLoader[Sample]:
        """Training samples, shuffled."""
        return self._loader("train", shuffle=True)

    def val_dataloader(self) -> DataLoader[Sample] | list[DataLoader[Sample]]:
        """Validation samples, in order; no loader at all with ``validation_fraction=0``."""
        return self._loader("validation") if self.validation_fraction else []

    def test_dataloader(self) -> DataLoader[Sample]:
        """As ``val_dataloader``."""
        return self._held_out("test")

    def predict_dataloader(self) -> DataLoader[Sample]:
        """As ``val_dataloader``."""
        return self._held_out("predict")

    @cached_property
    def validation_unigram_entropy(self) -> float:
        """Nats per token of the validation documents for a model that knows token frequencies only."""
        pieces = (self._store.tokens[start:stop] for start, stop in self._split.validation)
        return entropy(count_tokens(pieces, self.vocab_size))

    @cached_property
    def _store(self) -> TokenStore:
        return open_store(self._corpus(), self.tokenizer, self.cache_dir)

    @cached_property
    def _split(self) -> Split:
        return split_documents(
            self._store.names,
            self._store.spans,
            validation_fraction=self.validation_fraction,
            seed=self.seed,
            max_documents=self.max_documents,
            max_tokens=self.max_tokens,
        )

    def _corpus(self) -> Corpus:
        return standard_library() if self.path is None else folder_or_file(Path(self.path))

    def _samples(self, part: str, spans: Spans) -> PackedDataset:
        samples: Packing = pack(self.packing, spans, self.seq_len)
        if not len(spans):
            raise ValueError(
                f"validation_fraction={self.validation_fraction} leaves no {part} documents. "
                "Change validation_fraction (0 validates on none) or seed, give more documents, or raise max_documents "
                "or max_tokens."
            )
        if not len(samples):
            raise ValueError(
                f"seq_len={self.seq_len} needs more than the {count(spans):,} tokens of the {len(spans):,} {part} "
                "documents. Use a shorter seq_len, another validation_fraction, or more text."
            )
        return PackedDataset(self._store, samples)

    def _loader(self, part: str, shuffle: bool = False) -> DataLoader[Sample]:
        return DataLoader(
            self._datasets[part],
            batch_size=self.batch_size,
            shuffle=shuffle,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            collate_fn=PadCollate(self.tokenizer.eos_id) if self.packing == "document" else None,
        )

    def _held_out(self, stage: str) -> DataLoader[Sample]:
        if not self.validation_fraction:
            raise ValueError(f"validation_fraction=0 leaves no documents to {stage} with. Use a larger one.")
        return self._loader("validation")

    @rank_zero_only
    def _announce(self, split: Split) -> None:
        parts = [("training", split.train)] + [("validation", split.validation)] * bool(self.validation_fraction)
        sizes = " and ".join(f"{len(spans):,} {part} documents of {count(spans):,} tokens" for part, spans in parts)
        rank_zero_info(f"Corpus {self._store.folder.name}: {sizes}.")
        if self.validation_fraction:
            rank_zero_info(
                f"A model that knows token frequencies alone has a validation loss of "
                f"{self.validation_unigram_entropy:.3f} nats per token (unigram entropy)."
            )
        if self.packing == "concat":
            rank_zero_info(
                "packing=concat: documents in the same window see each other. Use packing=packed to keep them apart."
            )


def count(spans: Spans) -> int:
    """Tokens of documents."""
    return int((spans[:, 1] - spans[:, 0]).sum())
