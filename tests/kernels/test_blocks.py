"""Block sizes: there is one for every width and dtype, and the search space is made of possible ones."""

import pytest
import torch

from lightning_longctx.kernels import blocks
from lightning_longctx.kernels.blocks import Blocks, blocks_for, padded_width, space, use_blocks

PASSES = ("forward", "dq", "dkdv")


@pytest.mark.parametrize(
    ("width", "padded"), [(1, 16), (16, 16), (17, 32), (80, 128), (128, 128), (200, 256), (256, 256)]
)
def test_padded_width(width, padded):
    assert padded_width(width) == padded


@pytest.mark.parametrize("which", PASSES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("width", [1, 64, 80, 256])
def test_every_width_has_blocks(which, dtype, width):
    chosen = blocks_for(which, width, dtype)
    assert all(size >= 16 and size & (size - 1) == 0 for size in chosen[:2])
    assert chosen.num_warps in (4, 8) and chosen.num_stages >= 1


@pytest.mark.parametrize("which", PASSES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [64, 128, 256])
def test_the_space_holds_what_is_used(which, dtype, width):
    candidates = list(space(which, width, dtype))
    assert len(candidates) == len(set(candidates)) > 4
    assert blocks_for(which, width, dtype) in candidates


def test_what_was_found_is_used(monkeypatch):
    monkeypatch.setattr(blocks, "_tuned", {})
    before = blocks_for("forward", 128, torch.float16)
    use_blocks("forward", 128, torch.bfloat16, Blocks(64, 32, 4, 1))
    assert blocks_for("forward", 100, torch.float16) == Blocks(64, 32, 4, 1) != before
    assert blocks_for("forward", 128, torch.float32) != Blocks(64, 32, 4, 1) != blocks_for("dq", 128, torch.bfloat16)
