"""How near is the same: relative norms per tensor, and the values that tests use.

A tolerance is on ``|actual - expected| / |expected|`` in the Euclidean norm of a whole tensor. Elementwise comparison
punishes entries near zero, where another order of summation alone makes any relative error.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

FLOAT64 = 1e-10
"""Anything computed in float64: only the order of sums may differ."""
FLOAT32 = 1e-5
"""Outputs, losses and norms in float32."""
FLOAT32_GRAD = 2e-5
"""Gradients in float32: a backward pass has about twice the roundings."""
FLOAT32_WEIGHTS = 1e-5
"""Weights after some steps. Under Adam compare only the norm: it turns rounding of tiny gradients into whole steps."""
BFLOAT16 = 5e-3
"""Outputs in bfloat16 against float64 on the same inputs: rounding the result alone costs 1.7e-3."""
BFLOAT16_GRAD = 1e-2
"""Gradients in bfloat16."""
FLOAT16 = 7e-4
"""Outputs in float16: three bits more than bfloat16."""
FLOAT16_GRAD = 1.5e-3
"""Gradients in float16."""

_BY_DTYPE = {
    torch.float64: (FLOAT64, FLOAT64),
    torch.float32: (FLOAT32, FLOAT32_GRAD),
    torch.bfloat16: (BFLOAT16, BFLOAT16_GRAD),
    torch.float16: (FLOAT16, FLOAT16_GRAD),
}


def tolerance(dtype: torch.dtype, grad: bool = False) -> float:
    """The relative tolerance for values, or gradients, computed in a dtype.

    Raises:
        ValueError: No tolerance is known for the dtype.
    """
    if dtype not in _BY_DTYPE:
        raise ValueError(f"no tolerance for dtype={dtype}; known are {list(_BY_DTYPE)}.")
    return _BY_DTYPE[dtype][grad]


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """``|actual - expected| / |expected|`` in float64; the plain norm of the difference where ``expected`` is 0.

    Entries that are the same infinity in both are left out (the lse of a query without keys). Any other NaN or infinity
    gives NaN or infinity.
    """
    actual, expected = actual.detach().cpu().double(), expected.detach().cpu().double()
    finite = ~(expected.isinf() & (actual == expected))
    actual, expected = actual[finite], expected[finite]
    difference, size = (actual - expected).norm().item(), expected.norm().item()
    return difference / size if size else difference


def assert_close_relative(actual: Tensor, expected: Tensor, name: str = "tensor", rtol: float = FLOAT32) -> None:
    """Assert that shapes agree and ``relative_error`` is at most ``rtol``.

    Raises:
        AssertionError: Otherwise; says by how much, and where the largest difference is.
    """
    if actual.shape != expected.shape:
        raise AssertionError(f"{name}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}.")
    error = relative_error(actual, expected)
    if not error <= rtol:  # written so that NaN fails
        raise AssertionError(f"{name}: relative error {error:.3g} exceeds {rtol:.3g}. {_worst(actual, expected)}")


def assert_all_close_relative(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], name: str = "tensor", rtol: float = FLOAT32
) -> None:
    """``assert_close_relative`` for each pair of two state dicts with the same keys; reports all that fail.

    Raises:
        AssertionError: Otherwise.
    """
    if actual.keys() != expected.keys():
        missing, extra = sorted(expected.keys() - actual.keys()), sorted(actual.keys() - expected.keys())
        raise AssertionError(f"{name}: missing {missing}, not expected {extra}.")
    failures = []
    for key in expected:
        try:
            assert_close_relative(actual[key], expected[key], f"{name} {key}", rtol)
        except AssertionError as error:
            failures.append(str(error))
    if failures:
        raise AssertionError(f"{len(failures)} of {len(expected)} differ:\n" + "\n".join(failures))


def _worst(actual: Tensor, expected: Tensor) -> str:
    actual, expected = actual.detach().cpu().double(), expected.detach().cpu().double()
    difference = torch.where(actual == expected, 0.0, (actual - expected).abs())
    spoiled = (difference.isnan() | difference.isinf()).sum().item()
    # argmax takes NaN for the largest
    place = torch.unravel_index(difference.argmax(), difference.shape)
    index = tuple(int(position) for position in place)
    text = f"Largest difference at {list(index)}: {actual[index].item():.9g}, expected {expected[index].item():.9g}."
    return text + (f" {spoiled} of {difference.numel()} entries are not finite." if spoiled else "")
