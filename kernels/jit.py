"""``triton.jit`` whose mode is chosen when a kernel is launched: compiled, or interpreted under ``TRITON_INTERPRET=1``.

Triton decides when a function is decorated, and for its own functions (``tl.sum``, ``tl.zeros``) when it is imported,
which PyTorch and Lightning do long before a kernel is wanted. Here the switch is read at each launch, so one process
can interpret on CPU and compile for a GPU. A kernel that calls one of Triton's own compiled functions says what the
interpreter should call instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU in NumPy: ``TRITON_INTERPRET=1`` in the environment."""
    return bool(triton.knobs.runtime.interpret)


class Kernel(JITFunction):
    """A kernel, or a function that kernels call.

    Args:
        fn: Its body.
        interpreted: What an interpreted kernel calls in its place; None is the body itself.
        options: As those of ``triton.jit``.
    """

    def __init__(self, fn: Callable[..., Any], interpreted: Callable[..., Any] | None = None, **options: Any) -> None:
        super().__init__(fn, **options)
        self._interpreted = InterpretedFunction(fn)
        self._in_its_place = interpreted

    def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        """Launch; called by ``kernel[grid](...)``."""
        if interpreting():
            return self._interpreted.run(*args, grid=grid, warmup=warmup, **kwargs)
        return super().run(*args, grid=grid, warmup=warmup, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Called from an interpreted kernel; the compiler inlines and never comes here."""
        return (self._in_its_place or self._interpreted.rewrite())(*args, **kwargs)


def jit(fn: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Decorator; options as those of ``Kernel``."""
    return (lambda wrapped: Kernel(wrapped, **options)) if fn is None else Kernel(fn, **options)


def check_device(tensor: Tensor) -> None:
    """Refuse what cannot be launched, before Triton looks for a driver.

    Raises:
        ValueError: The tensor is on no GPU, and the interpreter is off.
    """
    if tensor.device.type != "cuda" and not interpreting():
        raise ValueError(
            f"Triton kernels run on CUDA devices, not on {tensor.device.type}: set TRITON_INTERPRET=1 to interpret "
            "them on CPU, which is for tests and very slow."
        )
