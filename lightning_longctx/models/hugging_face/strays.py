"""Hugging Face models that a step calls although the module does not hold them where they are looked for.

Such a model keeps its own attention and would see one shard as if it were the sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from lightning_longctx.models.hugging_face.calls import reads_tokens


@contextmanager
def no_strays(kind: type, known: Iterable[nn.Module]) -> Iterator[None]:
    """While open, calls of other models than the known ones raise a ``ValueError``.

    Args:
        kind: ``PreTrainedModel``.
        known: The models that are set to our attention, and those they are made of.
    """
    set_to_ours = set(map(id, known))

    def check(module: nn.Module, args: tuple[Any, ...]) -> None:
        if isinstance(module, kind) and id(module) not in set_to_ours and reads_tokens(type(module)):
            raise ValueError(
                f"a step called {type(module).__name__}, which was not found in the module: it would attend within "
                "this rank's shard. Keep the model as an attribute of the module, or in a short list or dict of it: "
                "self.teacher = model, with requires_grad_(False) if it is not to learn."
            )

    handle = register_module_forward_pre_hook(check)
    try:
        yield
    finally:
        handle.remove()
