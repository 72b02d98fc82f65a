"""The fused merge against the torch one, and the rows that saw nothing."""

import math

import pytest
import torch

from lightning_longctx.attention.merge import merge_ as torch_merge_
from lightning_longctx.testing.tolerances import FLOAT64, assert_close_relative

pytestmark = pytest.mark.usefixtures("interpreter")


def parts(dtype=torch.float64, width=24):
    torch.manual_seed(0)
    out, new_out = (torch.randn(2, 20, 3, width, dtype=dtype).transpose(1, 2) for _ in range(2))
    lse, new_lse = (torch.randn(2, 3, 20, dtype=dtype) * 5 for _ in range(2))
    lse[:, :, :4], new_lse[:, :, 2:6] = -math.inf, -math.inf
    lse[0, 0, 7], new_lse[0, 0, 7] = 900.0, -900.0
    lse[0, 0, 8], new_lse[0, 0, 8] = -900.0, 900.0
    return (
        out.masked_fill(lse.isinf()[..., None], 0.0),
        lse,
        new_out.masked_fill(new_lse.isinf()[..., None], 0.0),
        new_lse,
    )


@pytest.mark.parametrize("width", [24, 64])
def test_as_the_torch_merge(width):
    from lightning_longctx.kernels.merge import merge_

    ours, expected = parts(width=width), parts(width=width)
    merge_(*ours)
    torch_merge_(*expected)
    for index, name in enumerate(("out", "lse", "new_out", "new_lse")):
        assert_close_relative(ours[index], expected[index], name, FLOAT64)
        assert torch.equal(ours[index].isinf(), expected[index].isinf())
    assert (ours[0][:, :, 2:4] == 0).all() and (ours[1][:, :, 2:4] == -math.inf).all()
    assert torch.equal(ours[0][0, 0, 8], ours[2][0, 0, 8]), "the far larger one wins exactly"


def test_float32_and_slices():
    """Float32 sums take bfloat16 results; rows outside of a slice stay, bit for bit."""
    from lightning_longctx.kernels.merge import merge_

    out, lse, new_out, new_lse = parts(torch.float32)
    before, new_out = (out.clone(), lse.clone()), new_out.bfloat16()
    expected = [tensor[:, :, 5:17].double() for tensor in (out, lse, new_out, new_lse)]
    torch_merge_(*expected)
    merge_(*(tensor[:, :, 5:17] for tensor in (out, lse, new_out, new_lse)))
    assert_close_relative(out[:, :, 5:17], expected[0], "out")
    assert_close_relative(lse[:, :, 5:17], expected[1], "lse")
    for tensor, old in zip((out, lse), before, strict=True):
        assert torch.equal(tensor[:, :, :5], old[:, :, :5]) and torch.equal(tensor[:, :, 17:], old[:, :, 17:])


def test_rows_without_new_keys_take_nothing_from_memory():
    from lightning_longctx.kernels.merge import merge_

    out, lse, new_out, new_lse = parts()
    kept = new_lse == -math.inf
    new_out = new_out.masked_fill(kept[..., None], math.nan)
    before = out.clone(), lse.clone()
    merge_(out, lse, new_out, new_lse)
    assert torch.equal(out[kept], before[0][kept]) and torch.equal(lse[kept], before[1][kept])
    assert out.isfinite().all()


def test_what_cannot_be_merged():
    from lightning_longctx.kernels.merge import merge_

    out, lse, new_out, new_lse = parts()
    with pytest.raises(ValueError, match="don't fit"):
        merge_(out, lse, new_out[:, :, :5], new_lse)
    with pytest.raises(ValueError, match="last dim must be dense"):
        merge_(torch.zeros(2, 24, 3, 20, dtype=torch.float64).transpose(1, 3).transpose(1, 2), lse, new_out, new_lse)
