"""What turns text into token ids: a contract, and bytes as the default that needs no download."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

TokenArray = NDArray[np.unsignedinteger[Any]]
"""Token ids as the cache stores them: uint16 or uint32."""


@runtime_checkable
class Tokenizer(Protocol):
    """What a corpus needs of a tokenizer. It must give the same ids on every machine.

    Recipes name an implementation by its class path; its ``encode`` and ``decode`` need the annotations ``text: str``
    and ``-> str`` to be recognised.
    """

    @property
    def vocab_size(self) -> int:
        """Number of ids, the end of document included; every id is below it."""
        ...

    @property
    def eos_id(self) -> int:
        """The id that ends a document."""
        ...

    @property
    def fingerprint(self) -> str:
        """Name and version, part of the cache key: it must change whenever ``encode`` would give other ids."""
        ...

    # Any, because jsonargparse wants an implementation's annotations to equal these, not to be narrower.
    def encode(self, text: str) -> Any:
        """Ids of a document's text without the end of document, as a 1-D integer array."""
        ...

    def decode(self, tokens: Any) -> str:
        """Text of a 1-D integer array of ids; the end of document gives no text."""
        ...


class ByteTokenizer:
    """Every byte of the UTF-8 text is a token; 256 ends a document."""

    vocab_size = 257
    eos_id = 256
    fingerprint = "bytes-v1"

    def encode(self, text: str) -> NDArray[np.uint16]:
        """Bytes of ``text`` as uint16."""
        return np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8).astype(np.uint16)

    def decode(self, tokens: TokenArray) -> str:
        """Text of byte ids; a sample may begin or end inside a character, which then shows as U+FFFD."""
        tokens = np.asarray(tokens)
        return tokens[tokens < 256].astype(np.uint8).tobytes().decode("utf-8", errors="replace")


def token_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger[Any]]:
    """Narrowest dtype that stores the ids: uint16 up to 65,536 of them, else uint32."""
    return np.dtype(np.uint16) if vocab_size <= 1 << 16 else np.dtype(np.uint32)
