"""Tokenizers of pretrained models: from a GGUF file as from a tokenizer.json, and a cache that knows them apart."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_longctx.data import PretrainedTokenizer, TextDataModule, Tokenizer
from lightning_longctx.data.gguf_tokenizer import gguf_tokenizer
from lightning_longctx.models.pretrained.gguf import read_gguf
from tests.models.tiny_gguf import TOKENS, write_gguf

EOS = "<|endoftext|>"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf"))


@pytest.fixture(scope="module")
def tokenizer(file: str) -> PretrainedTokenizer:
    return PretrainedTokenizer(file, eos=EOS)


def test_it_keeps_the_contract(file: str, tokenizer: PretrainedTokenizer) -> None:
    assert isinstance(tokenizer, Tokenizer)
    assert (tokenizer.vocab_size, tokenizer.eos_id, tokenizer.eos) == (len(TOKENS), 0, EOS)
    assert PretrainedTokenizer(file).eos_id == 2  # as the file says


@given(st.text())
def test_text_round_trips(tokenizer: PretrainedTokenizer, text: str) -> None:
    tokens = tokenizer.encode(text)
    assert tokens.dtype == np.uint32 and (len(tokens) == 0 or tokens.max() < tokenizer.vocab_size)
    shown = text.encode(errors="replace").decode()
    assert tokenizer.decode(np.append(tokens, tokenizer.eos_id)) == shown.replace(EOS, "")


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("to be", ["to", "Ġbe"]),
        ("  12", ["ĠĠ", "1", "2"]),  # digits stay single, and spaces before them are no part of a number
        ("   be", ["ĠĠ", "Ġbe"]),
        ("½²", ["Â", "½", "Â", "²"]),
        ("to<|im_end|>be", ["to", "<|im_end|>", "be"]),
        ("", []),
    ],
)
def test_pieces(tokenizer: PretrainedTokenizer, text: str, pieces: list[str]) -> None:
    assert [TOKENS[token] for token in tokenizer.encode(text)] == pieces


def test_without_single_digits_numbers_merge(tmp_path: Path) -> None:
    plain = PretrainedTokenizer(str(write_gguf(tmp_path / "gpt2.gguf", pre="gpt-2")))
    assert [TOKENS[token] for token in plain.encode("  12")] == ["Ġ", "Ġ", "12"]


def test_half_a_surrogate_pair_is_shown_as_such(tokenizer: PretrainedTokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("to \ud800")) == "to ?"


def test_the_same_from_a_hugging_face_folder(tmp_path: Path, file: str, tokenizer: PretrainedTokenizer) -> None:
    inner = gguf_tokenizer(read_gguf(file).metadata)
    inner.enable_truncation(2)
    inner.enable_padding(length=9)
    inner.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": EOS}}))
    for source in (tmp_path, tmp_path / "tokenizer.json"):
        other = PretrainedTokenizer(str(source))
        assert other.eos_id == tokenizer.eos_id
        assert other.encode("to be or not to be").tolist() == tokenizer.encode("to be or not to be").tolist()
        assert other.fingerprint == tokenizer.fingerprint
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(ValueError, match="eos=null"):
        PretrainedTokenizer(str(tmp_path))


def test_wrong_options_are_refused(tmp_path: Path, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"eos=</s> is no token"):
        PretrainedTokenizer(file, eos="</s>")
    with pytest.raises(ValueError, match=r"pretrained=nowhere does not exist"):
        PretrainedTokenizer("nowhere")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="has no tokenizer.json"):
        PretrainedTokenizer(str(tmp_path))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match="pip install tokenizers"):
        PretrainedTokenizer(file)


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("model", "llama", "tokenizer.ggml.model='llama'"),
        ("pre", "llama-bpe", "tokenizer.ggml.pre='llama-bpe'"),
        ("pre", None, "tokenizer.ggml.pre=None"),
        ("merges", None, "tokenizer.ggml.merges is missing"),
        ("add_space_prefix", True, "add_space_prefix"),
        ("token_type", [6] + [1] * (len(TOKENS) - 1), "token_type=6"),
    ],
)
def test_kinds_that_are_not_known_are_refused(file: str, key: str, value: object, named: str) -> None:
    metadata = dict(read_gguf(file).metadata)
    metadata.pop(f"tokenizer.ggml.{key}", None)
    if value is not None:
        metadata[f"tokenizer.ggml.{key}"] = value
    with pytest.raises(ValueError) as refused:
        gguf_tokenizer(metadata)
    assert named in str(refused.value)


def test_a_corpus_is_cached_by_tokenizer(tmp_path: Path, file: str, tokenizer: PretrainedTokenizer) -> None:
    (tmp_path / "texts").mkdir()
    for name in range(8):
        (tmp_path / "texts" / f"{name}.txt").write_text(f"{name} " + "to be or not to be, " * 20)
    folders = set()
    for chosen in (None, tokenizer, PretrainedTokenizer(file), PretrainedTokenizer(file, eos=EOS)):
        data = TextDataModule(
            str(tmp_path / "texts"), chosen, seq_len=32, cache_dir=str(tmp_path / "cache"), validation_fraction=0
        )
        data.prepare_data()
        data.setup()
        folders.add(data._store.folder.name)
        sample = next(iter(data.train_dataloader()))["input_ids"]
        assert "to be" in data.tokenizer.decode(sample[0].numpy())
    assert len(folders) == 3  # bytes, one end of document and the other


def test_another_vocabulary_has_another_fingerprint(tmp_path: Path, file: str, tokenizer: PretrainedTokenizer) -> None:
    known = read_gguf(file)
    merges = known.metadata["tokenizer.ggml.merges"]
    fewer = replace(known, metadata={**known.metadata, "tokenizer.ggml.merges": merges[1:]})
    gguf_tokenizer(fewer.metadata).save(str(tmp_path / "tokenizer.json"))
    assert PretrainedTokenizer(str(tmp_path / "tokenizer.json"), eos=EOS).fingerprint != tokenizer.fingerprint
