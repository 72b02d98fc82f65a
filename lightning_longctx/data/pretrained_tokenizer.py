"""The tokenizer that a pretrained model was trained with, from the files on this machine."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lightning_longctx.data.gguf_tokenizer import KEY, gguf_tokenizer
from lightning_longctx.models.pretrained.gguf import read_gguf
from lightning_longctx.models.pretrained.sources import locate

if TYPE_CHECKING:
    import tokenizers

FILE, SETTINGS = "tokenizer.json", "tokenizer_config.json"


class PretrainedTokenizer:
    """Ids of a pretrained model, by the ``tokenizers`` library of Hugging Face.

    Names of special tokens in the text, such as ``<|im_start|>``, become these tokens. No token is added at the
    beginning of a document.

    Args:
        pretrained: What the model's own option ``pretrained`` takes: ``smollm2``, a GGUF file, or a Hugging Face folder
            with its ``tokenizer.json``; or such a file by itself.
        eos: The token that ends a document, such as ``<|endoftext|>``. ``null`` is what the files say: of a chat model,
            that is the end of an answer.

    Raises:
        ValueError: There is no tokenizer, or none that can be read, or it has no such token; or the package tokenizers
            is missing.
    """

    def __init__(self, pretrained: str, eos: str | None = None) -> None:
        self.pretrained = pretrained
        self._tokenizer, known = _read(pretrained)
        self.eos = known if eos is None else eos
        if self.eos is None:
            raise ValueError(f"eos=null, but {pretrained} does not say which token ends a document. Set eos.")
        eos_id = self._tokenizer.token_to_id(self.eos)
        if eos_id is None:
            raise ValueError(f"eos={self.eos} is no token of {pretrained}. Set it to one.")
        self._eos_id = eos_id
        self._vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def vocab_size(self) -> int:
        """Number of ids; a model may have rows for more."""
        return self._vocab_size

    @property
    def eos_id(self) -> int:
        """The id of ``eos``."""
        return self._eos_id

    @property
    def fingerprint(self) -> str:
        """Hash of everything that the tokenizer knows."""
        return f"tokenizers-{hashlib.sha256(self._tokenizer.to_str().encode()).hexdigest()}"

    def encode(self, text: str) -> NDArray[np.uint32]:
        """Ids of a text, as uint32; half a surrogate pair, which no file can hold, becomes a question mark."""
        text = text.encode("utf-8", errors="replace").decode("utf-8")
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.uint32)

    def decode(self, tokens: Any) -> str:
        """Text of ids; a sample may begin or end inside a character, which then shows as U+FFFD."""
        tokens = np.asarray(tokens)
        return self._tokenizer.decode(tokens[tokens != self.eos_id].tolist(), skip_special_tokens=False)


def _read(pretrained: str) -> tuple[tokenizers.Tokenizer, str | None]:
    """A tokenizer, and what its files say of the end of a document."""
    try:
        import tokenizers
    except ImportError as problem:
        raise ValueError("reading a tokenizer needs: pip install tokenizers") from problem
    path = Path(pretrained).expanduser()
    if path.is_dir() and (path / FILE).is_file():
        path = path / FILE
    if not (path.suffix == ".json" and path.is_file()):
        path = locate(pretrained)
    if path.suffix == ".gguf":
        return _from_gguf(path)
    if path.is_dir():
        raise ValueError(f"{path} has no {FILE}: save the model's tokenizer to it, or give the file of another folder.")
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer, _declared_eos(path.with_name(SETTINGS))


def _from_gguf(path: Path) -> tuple[tokenizers.Tokenizer, str | None]:
    metadata = read_gguf(path).metadata
    try:
        tokenizer = gguf_tokenizer(metadata)
    except ValueError as problem:
        raise ValueError(f"{path}: {problem}") from problem
    eos = metadata.get(f"{KEY}eos_token_id")
    return tokenizer, None if eos is None else tokenizer.id_to_token(eos)


def _declared_eos(path: Path) -> str | None:
    declared = json.loads(path.read_text(encoding="utf-8")).get("eos_token") if path.is_file() else None
    return declared["content"] if isinstance(declared, dict) else declared
