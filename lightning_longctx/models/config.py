"""The shape of a decoder, as one validated value."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_longctx.plan.mask import Mask

MLP_MULTIPLE = 64
"""The default hidden width of an MLP is rounded up to a multiple of this, for the sake of matrix units."""


@dataclass(frozen=True)
class DecoderConfig:
    """Shape of a Llama-style decoder.

    Args:
        vocab_size: Number of token ids, and of logits per token. The default fits the byte tokenizer: 256 bytes and
            one end of document.
        width: Width of the residual stream.
        num_layers: Number of blocks.
        num_heads: Query heads of one block.
        num_kv_heads: Key and value heads of one block, each shared by ``num_heads / num_kv_heads`` query heads
            (GQA, arXiv 2305.13245). ``null`` gives every query head its own.
        head_width: Width of one head; even, because rotary positions turn pairs. ``null`` is ``width / num_heads``.
        mlp_width: Hidden width of the MLP. ``null`` is ``8 / 3 * width``, rounded up to a multiple of 64.
        rope_base: Base of the rotary frequencies; longer contexts want a larger one.
        norm_eps: What RMSNorm adds to the mean square.
        tie_embeddings: Use the embedding as the output head too.
        windows: How many keys a query of each layer sees, itself included; ``null`` is all earlier ones. Cycled over
            the layers: ``[1024, null]`` alternates windowed and full layers.
        sinks: Give every query head of every layer a learned logit that takes part in its softmax without a value, as
            in gpt-oss (after arXiv 2309.17453): a head may then attend to nothing. It starts at 0.

    Raises:
        ValueError: The values do not fit together; the message names the option and values that fit.
    """

    vocab_size: int = 257
    width: int = 256
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int | None = None
    head_width: int | None = None
    mlp_width: int | None = None
    rope_base: float = 10000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    windows: tuple[int | None, ...] = (None,)
    sinks: bool = False

    def __post_init__(self) -> None:
        self._check_sizes()
        self._check_windows()
        if self.num_heads % self.kv_heads:
            fitting = [count for count in range(1, self.num_heads + 1) if self.num_heads % count == 0]
            raise ValueError(
                f"num_kv_heads={self.num_kv_heads} does not divide num_heads={self.num_heads}. "
                f"Use num_kv_heads={' or '.join(map(str, fitting))}."
            )
        if self.head_width is None and self.width % self.num_heads:
            raise ValueError(
                f"num_heads={self.num_heads} does not divide width={self.width}. "
                "Choose a width that it divides, or set head_width."
            )
        if self.head_size % 2:
            raise ValueError(
                f"head_width={self.head_size} is odd, but rotary positions turn pairs. "
                f"Set head_width={self.head_size + 1}, or choose width and num_heads whose quotient is even."
            )

    def _check_sizes(self) -> None:
        optional = ("num_kv_heads", "head_width", "mlp_width")
        for name in ("vocab_size", "width", "num_layers", "num_heads", *optional):
            value = getattr(self, name)
            if value is None and name in optional:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}={value!r} must be a positive integer{' or null' * (name in optional)}.")
        if not self.rope_base > 1:
            raise ValueError(f"rope_base={self.rope_base} must be larger than 1; Llama models use 10000 to 500000.")
        if not self.norm_eps > 0:
            raise ValueError(f"norm_eps={self.norm_eps} must be positive; 1e-5 or 1e-6 are usual.")

    def _check_windows(self) -> None:
        object.__setattr__(self, "windows", tuple(self.windows))  # a list would make the config unhashable
        counts = [window for window in self.windows if window is not None]
        whole = all(isinstance(count, int) and not isinstance(count, bool) and count >= 1 for count in counts)
        if not 1 <= len(self.windows) <= self.num_layers or not whole:
            raise ValueError(
                f"windows={list(self.windows)} must be a list of positive integers or null, of one to "
                f"num_layers={self.num_layers} entries. [null] is full attention in all layers."
            )

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """The window of every layer."""
        return tuple(self.windows[layer % len(self.windows)] for layer in range(self.num_layers))

    @property
    def attention_masks(self) -> tuple[Mask, ...]:
        """The masks of the layers, one for each: what ``layout: auto`` counts with."""
        return tuple(Mask(window=window) for window in self.layer_windows)

    @property
    def kv_heads(self) -> int:
        """Key and value heads of one block."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_size(self) -> int:
        """Width of one head."""
        return self.width // self.num_heads if self.head_width is None else self.head_width

    @property
    def mlp_size(self) -> int:
        """Hidden width of the MLP."""
        if self.mlp_width is not None:
            return self.mlp_width
        return -(-8 * self.width // (3 * MLP_MULTIPLE)) * MLP_MULTIPLE
