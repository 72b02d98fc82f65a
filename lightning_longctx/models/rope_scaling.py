"""Rotary positions for sequences longer than those of pretraining: how frequencies are scaled.

The kinds, their parameters and their numbers are those of transformers (``rope_parameters`` in a ``config.json``).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from torch import Tensor

RopeType = Literal["linear", "dynamic", "llama3", "yarn"]

REQUIRED: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
"""What every kind must be given."""

OPTIONAL: dict[str, tuple[str, ...]] = {
    "yarn": ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
}
"""What a kind may be given besides."""

BETA_FAST, BETA_SLOW = 32.0, 1.0
"""YaRN's bounds where none are given, from its paper."""


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are scaled; the names are those of ``rope_parameters`` in transformers.

    With ``base`` the model's ``rope_base``, ``D`` the width of a head and ``f_i = base ** (-2 i / D)``:

    * ``linear``: ``f_i / factor``.
    * ``dynamic`` (NTK-aware): the base becomes ``base * (factor * L / original - (factor - 1)) ** (D / (D - 2))`` for
      sequences of ``L > original`` tokens, and stays as it is for shorter ones.
    * ``llama3``: wavelengths above ``original / low_freq_factor`` become ``factor`` times longer, those below
      ``original / high_freq_factor`` stay, and those between go smoothly from one to the other.
    * ``yarn`` (arXiv 2309.00071): pairs that turn less than ``beta_slow`` times over ``original`` tokens are scaled as
      by ``linear``, those that turn more than ``beta_fast`` times stay, with a ramp between; cosine and sine are
      multiplied by ``attention_scale``, whatever the length of a sequence.

    Args:
        rope_type: One of the four kinds.
        factor: How many times longer than in pretraining sequences may be; at least 1.
        original_max_position_embeddings: Longest sequence of pretraining, in tokens. All but ``linear``.
        low_freq_factor: ``llama3``; the released models have 1.
        high_freq_factor: ``llama3``; the released models have 4.
        beta_fast: ``yarn``; null is 32.
        beta_slow: ``yarn``; null is 1.
        attention_factor: ``yarn``; what cosine and sine are multiplied by. null computes it: see ``attention_scale``.
        mscale: ``yarn``; goes into ``attention_factor``, together with ``mscale_all_dim``.
        mscale_all_dim: ``yarn``; see ``mscale``.
        truncate: ``yarn``; whether the ramp begins and ends at whole pairs. null is yes.

    Raises:
        ValueError: A parameter is missing, has a wrong value, or means nothing to this kind; the message names it.
    """

    rope_type: RopeType
    factor: float
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.rope_type, str) or self.rope_type not in REQUIRED:
            raise ValueError(f"rope_type={self.rope_type!r} is unknown; choose one of {', '.join(REQUIRED)}.")
        given = self.given
        required = REQUIRED[self.rope_type]
        used = (*required, *OPTIONAL.get(self.rope_type, ()))
        if missing := [name for name in required if name not in given]:
            raise ValueError(f"rope_type={self.rope_type} needs {' and '.join(missing)}. Add it.")
        if unused := [name for name in given if name not in used]:
            raise ValueError(
                f"{unused[0]}={given[unused[0]]} means nothing to rope_type={self.rope_type}, which has {used}. "
                "Leave it out."
            )
        self._check_values(given)

    def _check_values(self, given: dict[str, Any]) -> None:
        for name, value in given.items():
            if not _fits(name, value):
                kind = {
                    "truncate": "a boolean",
                    "factor": "a number of at least 1",
                    "original_max_position_embeddings": "a positive integer",
                }.get(name, "a positive number")
                raise ValueError(f"{name}={value!r} must be {kind}.")
        if self.rope_type == "llama3" and given["high_freq_factor"] <= given["low_freq_factor"]:
            raise ValueError(
                f"high_freq_factor={self.high_freq_factor} must be larger than low_freq_factor={self.low_freq_factor}."
            )
        if self.rope_type == "yarn":
            self._check_yarn()

    def _check_yarn(self) -> None:
        fast, slow = self.beta_fast or BETA_FAST, self.beta_slow or BETA_SLOW
        if fast < slow:
            raise ValueError(f"beta_fast={fast:g} must not be smaller than beta_slow={slow:g}.")
        scales = [name for name in ("mscale", "mscale_all_dim") if getattr(self, name) is not None]
        if scales and (len(scales) == 1 or self.attention_factor is not None):
            raise ValueError(
                f"{' and '.join(scales)} would go unused: mscale and mscale_all_dim count together, and only without "
                "attention_factor. Give both or none."
            )

    @classmethod
    def from_dict(cls, options: Any) -> RopeScaling:
        """From plain values, as ``dataclasses.asdict`` gives them.

        Raises:
            ValueError: They are no options of rotary scaling; the message names what is wrong.
        """
        known = [field.name for field in fields(cls)]
        if not isinstance(options, Mapping):
            raise ValueError(f"rope_scaling={options!r} must be a mapping with rope_type and factor, or null.")
        if unknown := [name for name in options if name not in known]:
            raise ValueError(f"rope_scaling has no option {unknown[0]!r}. Leave it out; known are {', '.join(known)}.")
        if missing := [name for name in ("rope_type", "factor") if name not in options]:
            raise ValueError(f"rope_scaling needs {' and '.join(missing)}. Add it.")
        return cls(**options)

    @property
    def given(self) -> dict[str, Any]:
        """The parameters that are set, by name, without ``rope_type``."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "rope_type"}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def depends_on_length(self) -> bool:
        """Whether frequencies differ from sequence to sequence."""
        return self.rope_type == "dynamic"

    @property
    def attention_scale(self) -> float:
        """What cosine and sine are multiplied by: ``0.1 ln(factor) + 1`` for ``yarn`` unless it is told; else 1."""
        if self.rope_type != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale is not None and self.mscale_all_dim is not None:
            return _temperature(self.factor, self.mscale) / _temperature(self.factor, self.mscale_all_dim)
        return _temperature(self.factor)


def stretched_base(scaling: RopeScaling, base: float, head_width: int, length: int) -> float:
    """The base that ``dynamic`` scaling uses for sequences of ``length`` tokens."""
    original = scaling.given["original_max_position_embeddings"]
    ratio = scaling.factor * max(length, original) / original - (scaling.factor - 1)
    return base * ratio ** (head_width / (head_width - 2))


def scaled_frequencies(powers: Tensor, scaling: RopeScaling, base: float) -> Tensor:
    """Frequencies of the kinds that do not look at the length.

    Args:
        powers: ``base ** (2 i / D)``, [D / 2], float32 or float64: one over the frequencies without scaling.
        scaling: Any kind but ``dynamic``.
        base: The base of ``powers``.

    Returns:
        Radians per position, as ``powers``.
    """
    if scaling.rope_type == "linear":
        return 1.0 / powers / scaling.factor
    return _llama3(1.0 / powers, **scaling.given) if scaling.rope_type == "llama3" else _yarn(powers, scaling, base)


def _llama3(
    plain: Tensor,
    factor: float,
    original_max_position_embeddings: int,
    low_freq_factor: float,
    high_freq_factor: float,
) -> Tensor:
    lengths = 2 * math.pi / plain
    share = (original_max_position_embeddings / lengths - low_freq_factor) / (high_freq_factor - low_freq_factor)
    between = (1 - share) * plain / factor + share * plain
    long = lengths > original_max_position_embeddings / low_freq_factor
    short = lengths < original_max_position_embeddings / high_freq_factor
    return torch.where(short, plain, torch.where(long, plain / factor, between))


def _yarn(powers: Tensor, scaling: RopeScaling, base: float) -> Tensor:
    num_pairs, original = len(powers), scaling.given["original_max_position_embeddings"]
    low = _pair_that_turns(scaling.beta_fast or BETA_FAST, original, base, num_pairs)
    high = _pair_that_turns(scaling.beta_slow or BETA_SLOW, original, base, num_pairs)
    if scaling.truncate is not False:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * num_pairs - 1)
    if low == high:
        high += 0.001  # a step at this pair, as in transformers
    ramp = ((torch.arange(num_pairs, device=powers.device).to(powers.dtype) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (scaling.factor * powers) * (1 - kept) + 1.0 / powers * kept


def _pair_that_turns(turns: float, length: int, base: float, num_pairs: int) -> float:
    """Which pair, as a fraction, turns so many times over ``length`` positions."""
    return num_pairs * math.log(length / (turns * 2 * math.pi)) / math.log(base)


def _temperature(factor: float, weight: float = 1.0) -> float:
    return 0.1 * weight * math.log(factor) + 1.0


def _fits(name: str, value: Any) -> bool:
    if name == "truncate":
        return isinstance(value, bool)
    if not is_number(value) or (name == "original_max_position_embeddings" and not isinstance(value, int)):
        return False
    return value >= 1 if name == "factor" else value > 0


def is_number(value: Any) -> bool:
    """Whether an option is a finite number; a boolean is none, and neither is text that looks like one."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
