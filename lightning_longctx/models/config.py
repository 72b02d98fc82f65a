"""The shape of a decoder, as one validated value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from lightning_longctx.models.rope_scaling import RopeScaling, is_number
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
        rope_scaling: How rotary frequencies are scaled for sequences longer than those of pretraining; ``null`` is not
            at all.
        norm_eps: What RMSNorm adds to the mean square.
        qk_norm: Normalise every query and key head by an RMSNorm of its own before rotation, as Qwen3 does.
        tie_embeddings: Use the embedding as the output head too.
        windows: How many keys a query of each layer sees, itself included; ``null`` is all earlier ones. Cycled over
            the layers: ``[1024, null]`` alternates windowed and full layers.
        sinks: Give every query head of every layer a learned logit that takes part in its softmax without a value, as
            in gpt-oss (after arXiv 2309.17453): a head may then attend to nothing. It starts at 0.
        attention_dropout: Chance that a weight of the softmax is dropped, in training only.
        dropout: Chance that a number of the embedding, or of what a block writes into the residual stream, is dropped,
            in training only. This and attention's dropout draw the same for every layout and degree.
        softcap: Keep attention scores within plus and minus this, as ``softcap * tanh(score / softcap)``; Gemma 2 has
            50. ``null`` leaves them alone.
        max_positions: Longest document that the model is made for, in tokens. Nothing in training depends on it:
            export writes it down as ``max_position_embeddings``, for the programs that run the model.

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
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    qk_norm: bool = False
    tie_embeddings: bool = False
    windows: tuple[int | None, ...] = (None,)
    sinks: bool = False
    attention_dropout: float = 0.0
    dropout: float = 0.0
    softcap: float | None = None
    max_positions: int | None = None

    def __post_init__(self) -> None:
        self._check_sizes()
        self._check_numbers()
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
        if self.head_size == 2 and self.rope_scaling is not None and self.rope_scaling.depends_on_length:
            raise ValueError(
                "head_width=2 leaves nothing for rope_scaling.rope_type=dynamic to stretch: its only pair turns by 1 "
                "whatever the base. Use head_width=4 or more."
            )

    def _check_sizes(self) -> None:
        optional = ("num_kv_heads", "head_width", "mlp_width", "max_positions")
        for name in ("vocab_size", "width", "num_layers", "num_heads", *optional):
            value = getattr(self, name)
            if value is None and name in optional:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}={value!r} must be a positive integer{' or null' * (name in optional)}.")
        for name in ("qk_norm", "tie_embeddings", "sinks"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} must be true or false.")
        if self.rope_scaling is not None and not isinstance(self.rope_scaling, RopeScaling):
            raise ValueError(f"rope_scaling={self.rope_scaling!r} must be a RopeScaling, or null.")

    def _check_numbers(self) -> None:
        if not is_number(self.rope_base) or self.rope_base <= 1:
            raise ValueError(
                f"rope_base={self.rope_base!r} must be a finite number larger than 1; Llama models use 10000 to 500000."
            )
        if not is_number(self.norm_eps) or self.norm_eps <= 0:
            raise ValueError(f"norm_eps={self.norm_eps!r} must be a positive, finite number; 1e-5 or 1e-6 are usual.")
        for name in ("attention_dropout", "dropout"):
            value = getattr(self, name)
            if not is_number(value) or not 0 <= value < 1:
                raise ValueError(f"{name}={value!r} must be at least 0 and less than 1, as a number.")
        if self.softcap is not None and (not is_number(self.softcap) or self.softcap <= 0):
            raise ValueError(f"softcap={self.softcap!r} must be a positive, finite number; null leaves scores alone.")

    def _check_windows(self) -> None:
        if not isinstance(self.windows, (list, tuple)):
            raise ValueError(f"windows={self.windows!r} must be a list, such as [1024, null].")
        object.__setattr__(self, "windows", tuple(self.windows))  # a list would make the config unhashable
        counts = [window for window in self.windows if window is not None]
        whole = all(isinstance(count, int) and not isinstance(count, bool) and count >= 1 for count in counts)
        if not 1 <= len(self.windows) <= self.num_layers or not whole:
            raise ValueError(
                f"windows={list(self.windows)} must be a list of positive integers or null, of one to "
                f"num_layers={self.num_layers} entries. [null] is full attention in all layers."
            )

    def to_dict(self) -> dict[str, Any]:
        """All options as plain values, which any checkpoint can hold."""
        return asdict(self)

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> DecoderConfig:
        """Inverse of ``to_dict``.

        Raises:
            ValueError: An option is unknown or has a wrong value; the message names it.
        """
        known = [field.name for field in fields(cls)]
        if not isinstance(options, Mapping):
            raise ValueError(f"the decoder's options are a {type(options).__name__}, but must be a mapping.")
        if unknown := [name for name in options if name not in known]:
            raise ValueError(
                f"the decoder has no option {unknown[0]!r}: correct its name, or use the version of lightning_longctx "
                f"that knows it. Known are {', '.join(known)}."
            )
        scaling = options.get("rope_scaling")
        return cls(**{**options, "rope_scaling": None if scaling is None else RopeScaling.from_dict(scaling)})

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
