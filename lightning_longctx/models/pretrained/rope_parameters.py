"""Rotary positions in the ``config.json`` of a Hugging Face model: read and written. Pure.

transformers 4 keeps ``rope_theta`` beside a dict ``rope_scaling``, transformers 5 keeps all in ``rope_parameters``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_longctx.models.rope_scaling import REQUIRED, RopeScaling, is_number

ORIGINAL = "original_max_position_embeddings"
DEFAULT_BASE = 10000.0


def read_rope(file: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Base and scaling of the rotary frequencies.

    Args:
        file: Parsed ``config.json``, with ``max_position_embeddings``. What is null counts as left out.

    Raises:
        ValueError: A parameter is wrong, unknown or without meaning, or is given twice and differently.
    """
    scaling = _stated(file, "rope_scaling")
    parameters = _stated(file, "rope_parameters") or scaling
    stated = [form.pop("rope_theta", None) for form in (scaling, parameters)] + [file.get("rope_theta")]
    stated = [base for base in stated if base is not None]
    if wrong := [base for base in stated if not is_number(base)]:
        raise ValueError(f"rope_theta={wrong[0]!r} must be a finite number, without quotes. Correct the file.")
    bases = set(stated)
    if len(bases) > 1 or (scaling and scaling != parameters):
        raise ValueError("rope_parameters differ from rope_scaling and rope_theta. Correct the file.")
    base = float(bases.pop() if bases else DEFAULT_BASE)
    kind = parameters.pop("rope_type", "default")
    part = parameters.pop("partial_rotary_factor", file.get("partial_rotary_factor"))
    if part not in (None, 1):
        raise ValueError(f"partial_rotary_factor={part} cannot be honoured: the decoder turns whole heads.")
    if kind != "default":
        return base, _scaling(kind, parameters, file)
    if parameters:
        raise ValueError(f"{min(parameters)} means nothing to rope_type=default. Correct the file.")
    return base, None


def _stated(file: Mapping[str, Any], key: str) -> dict[str, Any]:
    stated = file.get(key)
    if stated is not None and not isinstance(stated, Mapping):
        raise ValueError(f"{key}={stated!r} must be an object with rope_type and its parameters. Correct the file.")
    form = {name: value for name, value in (stated or {}).items() if value is not None}
    if "type" in form:  # the name of old files
        form.setdefault("rope_type", form["type"])
        del form["type"]
    return form


def _scaling(kind: Any, parameters: dict[str, Any], file: Mapping[str, Any]) -> RopeScaling:
    if kind not in tuple(REQUIRED):
        raise ValueError(f"rope_type={kind!r} cannot be honoured; {', '.join(REQUIRED)} can.")
    if "factor" not in parameters:
        raise ValueError(f"rope_type={kind} needs factor. Add it to the file.")
    if unknown := sorted(parameters.keys() - RopeScaling.__dataclass_fields__.keys()):
        raise ValueError(f"rope parameter {unknown[0]}={parameters[unknown[0]]!r} cannot be honoured.")
    if ORIGINAL in REQUIRED[kind]:
        parameters = {**parameters, ORIGINAL: _original(kind, parameters, file)}
    return RopeScaling(rope_type=kind, **parameters)


def _original(kind: str, parameters: Mapping[str, Any], file: Mapping[str, Any]) -> int:
    """As transformers finds it: a value beside the parameters comes first, and ``dynamic`` looks at neither."""
    longest = file["max_position_embeddings"]
    original = file.get(ORIGINAL) or parameters.get(ORIGINAL) or longest
    if kind == "dynamic" and original != longest:
        raise ValueError(
            f"{ORIGINAL}={original} differs from max_position_embeddings={longest}, by which rope_type=dynamic goes. "
            f"Remove {ORIGINAL} from the file."
        )
    return original


def written_rope(base: float, scaling: RopeScaling | None) -> dict[str, Any]:
    """Both forms of the same, so that neither version of transformers falls back on a default."""
    parameters: dict[str, Any] = {"rope_type": "default"}
    if scaling is not None:
        parameters = {"rope_type": scaling.rope_type, **scaling.given}
        if scaling.rope_type == "dynamic":
            del parameters[ORIGINAL]  # it is max_position_embeddings
    return {
        "rope_theta": base,
        "rope_scaling": None if scaling is None else parameters,
        "rope_parameters": {**parameters, "rope_theta": base},
    }


def longest_sequence(scaling: RopeScaling | None, asked: int | None) -> int:
    """What to write as ``max_position_embeddings``.

    Args:
        scaling: How the model scales rotary frequencies.
        asked: What the user says; None leaves it to ``scaling``.

    Raises:
        ValueError: Neither says it, or it would change the scaling that readers compute.
    """
    implied = None
    if scaling is not None and scaling.original_max_position_embeddings is not None:
        stretch = 1 if scaling.rope_type == "dynamic" else scaling.factor
        implied = round(stretch * scaling.original_max_position_embeddings)
    longest = implied if asked is None else asked
    if longest is None:
        raise ValueError(
            "the longest sequence that the model is made for is known from nowhere: set max_position_embeddings, or "
            "max_positions in the decoder's configuration."
        )
    if longest < 1:
        raise ValueError(f"max_position_embeddings={longest} must be a positive integer.")
    # Of yarn, versions before 5 take the factor to be the quotient of this and the original length.
    if scaling is not None and scaling.rope_type in ("dynamic", "yarn") and longest != implied:
        raise ValueError(
            f"max_position_embeddings={longest} would change rotary scaling: readers of rope_type={scaling.rope_type} "
            f"take it to be {implied}. Set max_position_embeddings={implied}."
        )
    return longest
