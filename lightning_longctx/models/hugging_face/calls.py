"""What is said in a call of a Hugging Face model, checked before it runs over a shard."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from typing import Any

from torch import Tensor, nn

from lightning_longctx.models.hugging_face.masks import Sequences
from lightning_longctx.sequence.record import SequenceRecord

_WHOLE = "Over a sharded sequence "
_MADE_MASK = re.compile(r"(?<!\w)attention_mask = torch\.ones\(")
_GENERATE = (
    ": leave it out. generate() needs one: write the model to a folder (save_to, save_pretrained, or lightning-longctx "
    "export) and generate in another process."
)


def on_call(sequences: Sequences) -> Callable[..., Any]:
    """A forward pre-hook (with keywords) for every part of a model that transformers calls a model.

    It checks the call, settles which sequence it is about, passes that on where the model takes it, and turns the
    cache off.
    """
    return partial(_prepare, sequences)


def _prepare(
    sequences: Sequences, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    parameters = parameters_of(type(model).forward)
    said = dict(zip(parameters, args, strict=False)) | kwargs
    tokens = said.get("input_ids") if said.get("input_ids") is not None else said.get("inputs_embeds")
    if not isinstance(tokens, Tensor):
        return None  # a part that sees no tokens, such as a vision tower
    if said.get("output_router_logits") is None:
        said["output_router_logits"] = getattr(model.config, "output_router_logits", None)
    check_call(type(model).__name__, said, parameters)
    record = said.get("sequence")
    if not isinstance(record, SequenceRecord):
        record = sequences.fitting(tokens.shape[1])
    sequences.current = record
    more: dict[str, Any] = {}
    if parameters.get("sequence", parameters.get("kwargs")) is not None:
        more["sequence"] = record
    if "use_cache" in parameters and said.get("use_cache") is None:
        more["use_cache"] = False
    return args, kwargs | more


@lru_cache(maxsize=64)
def parameters_of(forward: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Of a forward method, in order and without ``self``; keywords of any name go by ``kwargs``."""
    _, *own = inspect.signature(forward).parameters.values()
    any_name = inspect.Parameter.VAR_KEYWORD
    return {"kwargs" if parameter.kind == any_name else parameter.name: parameter for parameter in own}


@lru_cache(maxsize=64)
def reads_tokens(model: type) -> bool:
    """Whether a class of models takes tokens, as a vision tower does not."""
    return not {"input_ids", "inputs_embeds"}.isdisjoint(parameters_of(model.forward))  # type: ignore[attr-defined]


def calls_refusal(parts: Iterable[nn.Module]) -> str | None:
    """Why no call of a model can be right over a shard; None if one can.

    Args:
        parts: The model and the models it is made of.
    """
    kinds = [type(part) for part in parts if reads_tokens(type(part))]
    if kinds and not any("position_ids" in parameters_of(kind.forward) for kind in kinds):
        return "it takes no position_ids and would count the tokens of each shard from 0"
    if any(_makes_a_mask(kind) for kind in kinds):
        return "it makes an attention_mask itself, which would cover one shard"
    return None


@lru_cache(maxsize=64)
def _makes_a_mask(model: type) -> bool:
    return bool(_MADE_MASK.search(inspect.getsource(model.forward)))  # type: ignore[attr-defined]


def check_call(model: str, said: dict[str, Any], known: Any) -> None:
    """Refuse a call whose result would depend on how the sequence is cut.

    Args:
        model: Name of the model's class.
        said: All arguments by name.
        known: Names that the forward method takes.

    Raises:
        ValueError: It would.
    """
    for name in ("cache", "past_key_values"):
        if said.get(name) is not None:
            raise ValueError(f"{model} got {name}. {_WHOLE}there is no key/value cache{_GENERATE}")
    if said.get("use_cache"):
        raise ValueError(f"{model} got use_cache=True. {_WHOLE}there is no key/value cache{_GENERATE}")
    if said.get("output_attentions"):
        raise ValueError(f"{model} got output_attentions=True. {_WHOLE}that is not available: leave it out.")
    if "position_ids" in known and said.get("position_ids") is None:
        raise ValueError(
            f"{model} got no position_ids and would count this rank's tokens from 0. Pass "
            "position_ids=batch['position_ids']."
        )
    keep = said.get("logits_to_keep")
    if isinstance(keep, int) and keep > 0:
        raise ValueError(f"{model} got logits_to_keep={keep}, the last tokens of each shard. {_WHOLE}leave it out.")
    if said.get("labels") is not None:
        _check_loss(model, said)


def _check_loss(model: str, said: dict[str, Any]) -> None:
    if said.get("shift_labels") is None:
        raise ValueError(
            f"{model} got labels without shift_labels and would shift them within this rank's shard. Pass both: "
            "model(..., labels=batch['shift_labels'], shift_labels=batch['shift_labels'])."
        )
    if said.get("output_router_logits"):
        raise ValueError(
            f"{model} got output_router_logits=True, and would add a balance loss of this rank's tokens only. Pass "
            "False, or use lightning_longctx.HuggingFaceModule, which counts the tokens of all ranks."
        )
    if said.get("num_items_in_batch") is not None:
        raise ValueError(
            f"{model} got num_items_in_batch, but the strategy weighs the mean of each rank by its own tokens. "
            "Leave it out."
        )
