"""Data: text files as tokens on disk, packed into samples, served by a ``LightningDataModule``."""

from lightning_longctx.data.cache import TokenStore, default_cache_dir, open_store, prepare_store
from lightning_longctx.data.corpus import Corpus, folder_or_file, standard_library
from lightning_longctx.data.packing import ConcatPacking, DocumentPacking, Packing, pack
from lightning_longctx.data.pretrained_tokenizer import PretrainedTokenizer
from lightning_longctx.data.samples import PackedDataset, PadCollate
from lightning_longctx.data.split import Split, split_documents
from lightning_longctx.data.statistics import unigram_entropy
from lightning_longctx.data.text import TextDataModule
from lightning_longctx.data.tokenizer import ByteTokenizer, Tokenizer

__all__ = [
    "ByteTokenizer",
    "ConcatPacking",
    "Corpus",
    "DocumentPacking",
    "PackedDataset",
    "Packing",
    "PadCollate",
    "PretrainedTokenizer",
    "Split",
    "TextDataModule",
    "TokenStore",
    "Tokenizer",
    "default_cache_dir",
    "folder_or_file",
    "open_store",
    "pack",
    "prepare_store",
    "split_documents",
    "standard_library",
    "unigram_entropy",
]
