"""Hugging Face models inside a module: found, checked, and set to attend over ranks while a step runs.

Nothing is changed for good. Around a step, and around its backward, which may recompute layers, every model's
configuration names our attention instead of its own (``attn_implementation``), and its calls are checked; afterwards
all is as before.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from lightning_longctx import _upstream
from lightning_longctx.models.hugging_face.attention import NAME, register
from lightning_longctx.models.hugging_face.calls import calls_refusal, on_call
from lightning_longctx.models.hugging_face.config import attention_dropout, attention_heads, config_refusal, text_config
from lightning_longctx.models.hugging_face.masks import Sequences
from lightning_longctx.models.hugging_face.rotary import length_dependent, see_whole_length
from lightning_longctx.models.hugging_face.strays import no_strays
from lightning_longctx.sequence.record import SequenceRecord
from lightning_longctx.topology.degrees import Degrees

_MODELS = "transformers.modeling_utils"
"""Where ``PreTrainedModel`` is; not imported, there is none."""
_MANY = 1024
"""Longer lists and dicts are data: no one keeps that many models in one."""
_WHOLE_SEQUENCE_HEADS = ("ForSequenceClassification", "ForQuestionAnswering", "ForMultipleChoice")


def find_models(module: nn.Module) -> list[Any]:
    """The outermost ``PreTrainedModel`` objects of a module, also such as are no submodules: in lists, say."""
    if _MODELS not in sys.modules:
        return []
    return list(_models(module, sys.modules[_MODELS].PreTrainedModel, set()))


def _models(value: Any, kind: type, seen: set[int]) -> Iterator[Any]:
    if id(value) in seen or not isinstance(value, nn.Module | Mapping | list | tuple):
        return
    seen.add(id(value))
    if isinstance(value, kind):
        yield value
        return
    members = vars(value) if isinstance(value, nn.Module) else value
    if len(members) <= _MANY:
        for member in members.values() if isinstance(members, Mapping) else members:
            yield from _models(member, kind, seen)


def check_models(module: nn.Module, degrees: Degrees) -> None:
    """Check that all Hugging Face models of a module can be trained on sequences spread that way.

    Raises:
        ValueError: One cannot.
    """
    for model in find_models(module):
        if degrees.tensor > 1 and (heads := attention_heads(model.config)) is not None:
            degrees.check_heads(*heads)
        if degrees.context * degrees.head == 1:
            continue
        if reason := refusal(model):
            spread = f"context={degrees.context}" + f", head={degrees.head}" * (degrees.head > 1)
            raise ValueError(
                f"{type(model).__name__} cannot attend over ranks ({spread}): {reason}. Train it with context=1 and "
                "head=1, or use another model."
            )
        if (heads := attention_heads(model.config)) is not None:
            degrees.check_heads(*heads)


def refusal(model: Any) -> str | None:
    """Why a model cannot be set to attend over ranks; None if it can."""
    name = type(model).__name__
    if name.endswith(_WHOLE_SEQUENCE_HEADS):
        return "its head reads the last token of a whole sequence, and this rank holds a part"
    if _upstream.keeps_a_state(model):
        return "it carries a state from token to token outside attention, which would start anew in each shard"
    if reason := config_refusal(model.config):
        return f"its configuration has {reason}"
    register()
    before = [(config, _upstream.attention_of(config)) for config in _configs([model])]
    try:
        model.set_attn_implementation(NAME)
        stubborn = any(_upstream.attention_of(config) != NAME for config, _ in before)
    finally:
        _restore(before)
    if stubborn:
        return "its layers do not look up their attention in transformers' registry"
    return _looks_both_ways(model) or calls_refusal(_parts(model))


def _looks_both_ways(model: Any) -> str | None:
    """Whether it is an encoder of a kind that may be a decoder; GPT-NeoX says it is no decoder, and looks back only."""
    encodes = any(getattr(part, "is_causal", True) is False for part in model.modules())
    if encodes and getattr(text_config(model.config), "is_decoder", True) is False:
        return (
            "its configuration has is_decoder=false: its tokens look both ways, and only causal attention is available"
        )
    return None


@contextmanager
def whole_models(module: nn.Module, records: Sequence[SequenceRecord]) -> Iterator[None]:
    """While open, Hugging Face models of a module see the whole sequences of which this rank holds shards.

    One rank that holds all of a sequence is treated the same where transformers' own attention would give other
    numbers than several ranks: packed documents, attention dropout, lengths of padded rows.

    Args:
        module: Any module.
        records: The ``sequence`` entries of the step's batch.

    Raises:
        ValueError: Sequences are spread over ranks, and a model is called that is none of the module's.
    """
    models = find_models(module) if records else []
    if not (spread := any(record.num_ranks * record.head > 1 for record in records)):
        models = [model for model in models if _differs(model, records) and refusal(model) is None]
    with ExitStack() as stack:
        if spread and _MODELS in sys.modules:
            known = (part for model in models for part in _parts(model))
            stack.enter_context(no_strays(sys.modules[_MODELS].PreTrainedModel, known))
        if not models:
            yield
            return
        register()
        before = [(config, _upstream.attention_of(config)) for config in _configs(models)]
        stack.callback(_restore, before)
        for config, _ in before:
            _upstream.set_attention(config, NAME)
        sequences = stack.enter_context(Sequences(tuple(records)))
        for model in models:
            for part in _parts(model):
                stack.callback(part.register_forward_pre_hook(on_call(sequences), with_kwargs=True).remove)
            for part in length_dependent(model):
                for handle in see_whole_length(part, sequences):
                    stack.callback(handle.remove)
        yield


def _differs(model: Any, records: Iterable[SequenceRecord]) -> bool:
    """Whether one rank would see other numbers in transformers' own attention than several ranks in ours."""
    drops = model.training and attention_dropout(model.config)
    packed = any(record.documents for record in records)
    padded = any(record.padded for record in records) and next(length_dependent(model), None) is not None
    return bool(drops or packed or padded)


def _parts(model: Any) -> Iterator[Any]:
    """The model and the models it is made of, as a causal language model is of its base model."""
    return (part for part in model.modules() if isinstance(part, sys.modules[_MODELS].PreTrainedModel))


def _configs(models: Iterable[Any]) -> list[Any]:
    return list({id(part.config): part.config for model in models for part in _parts(model)}.values())


def _restore(before: Iterable[tuple[Any, str | None]]) -> None:
    for config, name in before:
        _upstream.set_attention(config, name)
