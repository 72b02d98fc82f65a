"""Tensor ranks that share the output matrix have the numbers of one, tile by tile, and talk no more than they must."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lightning_longctx.loss import TiledLoss, linear_cross_entropy
from tests.loss.test_linear_cross_entropy import assert_same, inputs, step


def split_and_whole(vocab: int, tile_tokens: int | None, layouts: tuple[str, str]) -> list[dict[str, Tensor]]:
    """The same step with a matrix in parts, and whole; states are cut over tokens, replicated or plain."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor",))
    given = inputs(8, vocab, torch.float64)
    how, matrix = layouts
    placed = {"cut": [Shard(1)], "replicated": [Replicate()]}
    results = []
    for states, placement in ((how, matrix), ("plain", "plain")):
        leaves: list[Any] = [each.detach().clone() for each in given[:3]]
        if states != "plain":
            leaves[0] = distribute_tensor(leaves[0], mesh, placed[states], src_data_rank=None)
        if placement != "plain":
            where = [Shard(0)] if placement == "cut" else [Replicate()]
            leaves[1:] = [distribute_tensor(each, mesh, where, src_data_rank=None) for each in leaves[1:]]
        found = step(tile_tokens, (*(leaf.requires_grad_() for leaf in leaves), given[3]))
        results.append(
            {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in found.items()}
        )
    return results


SPLITS = [
    (2, 33, 5, ("cut", "cut")),
    (2, 33, 1, ("replicated", "cut")),
    (2, 12, None, ("plain", "cut")),
    (2, 12, 3, ("cut", "replicated")),
    (4, 33, 5, ("cut", "cut")),
    (4, 5, 5, ("cut", "cut")),
]
"""Ranks, vocabulary, tile, and how states and matrix are cut. Five ids over four ranks are 2, 2, 1 and 0."""


@pytest.mark.parametrize(("world", "vocab", "tile_tokens", "layouts"), SPLITS)
def test_tensor_ranks_have_the_numbers_of_one(gloo, world, vocab, tile_tokens, layouts) -> None:
    for split, whole in gloo(world).run(split_and_whole, vocab, tile_tokens, layouts):
        assert_same(split, whole, 1e-12)


def counted_messages(tile_tokens: int) -> dict[str, int]:
    from torch.distributed.tensor.debug import CommDebugMode

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor",))
    states, weight, _, labels = inputs(8, masked=0.0)
    states = distribute_tensor(states.detach(), mesh, [Shard(1)], src_data_rank=None).requires_grad_()
    weight = distribute_tensor(weight.detach(), mesh, [Shard(0)], src_data_rank=None).requires_grad_()
    with CommDebugMode() as seen:
        linear_cross_entropy(states, weight, labels, tile_tokens=tile_tokens)[0].backward()
    return {str(name).rpartition(".")[2]: count for name, count in seen.get_comm_counts().items()}


def test_tokens_are_gathered_once_and_gradients_scattered_once(gloo) -> None:
    for tile_tokens, tiles in ((4, 4), (16, 1)):
        for found in gloo(2).run(counted_messages, tile_tokens):
            gathers = sum(count for name, count in found.items() if "gather" in name)
            scatters = sum(count for name, count in found.items() if "reduce_scatter" in name)
            assert (gathers, scatters) == (1, 1), found
            assert found.get("allreduce_", 2 * tiles) == 2 * tiles, found


def what_is_refused() -> str:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor",))
    states, weight, _, labels = inputs(8)
    weight = distribute_tensor(weight.detach(), mesh, [Shard(1)], src_data_rank=None)
    with pytest.raises(ValueError) as refused:
        linear_cross_entropy(states, weight, labels)
    with pytest.raises(ValueError, match="loss.kernel=liger knows no matrix that tensor ranks share"):
        TiledLoss(kernel="liger")(states, weight, labels)
    return str(refused.value)


def test_a_matrix_that_is_cut_another_way_is_refused(gloo) -> None:
    for said in gloo(2).run(what_is_refused):
        assert "cut over the vocabulary alone" in said
