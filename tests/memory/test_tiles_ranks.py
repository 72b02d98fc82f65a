"""Token tiles where parameters are shared by ranks: cut by tensor ranks, sharded and replicated by FSDP2."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

from lightning_longctx._upstream import TorchDispatchMode, no_gradient_sync, replicate
from lightning_longctx.memory.tiling.tiles import tile, untile
from lightning_longctx.models import Decoder
from lightning_longctx.models.tensor_plan import decoder_plan
from lightning_longctx.strategy.gradients.norms import whole
from lightning_longctx.strategy.parameters.tensor_parallel import tensor_parallelise
from tests.cases.tiny import TINY, tiny_decoder
from tests.memory.tiled_modules import WIDTH, Block, assert_close

LENGTH = 12


def tensor_mesh() -> Any:
    return init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: whole(one.grad).clone() for name, one in module.named_parameters() if one.grad is not None}


def decoder_step(decoder: Decoder) -> dict[str, Tensor]:
    """Logits and gradients; the tensor ranks' parts of either put together."""
    decoder.zero_grad()
    generator = torch.Generator().manual_seed(1)
    logits = decoder(torch.randint(TINY.vocab_size, (2, LENGTH), generator=generator))
    logits = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
    (logits * torch.randn(logits.shape, generator=generator, dtype=logits.dtype)).sum().backward()
    return {"result": logits.detach(), **gradients(decoder)}


def tiled_tensor_ranks(wrapped: bool) -> None:
    expected = decoder_step(tiny_decoder())
    decoder = tiny_decoder()
    tensor_parallelise(decoder, tensor_mesh(), decoder_plan(TINY))
    if wrapped:
        for block in decoder.blocks:
            checkpoint(block)
    for tokens in (1, 4, 5, 8, 64):
        for block in decoder.blocks:
            tile(block.mlp, tokens, num_ranks=2)  # type: ignore[arg-type]
        assert_close(decoder_step(decoder), expected, 1e-12)


@pytest.mark.parametrize("wrapped", [False, True])
def test_tensor_ranks_get_their_own_tokens_of_every_tile(gloo, wrapped):
    gloo(2).run(tiled_tensor_ranks, wrapped)


class Collectives(TorchDispatchMode):
    """Counts them; torch's CommDebugMode loses its way where modules run in backward."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:  # of which the operations on local tensors come here afterwards
            return NotImplemented
        name = str(func).removeprefix("_c10d_functional.")
        self.count += name.startswith(("all_gather", "reduce_scatter", "all_reduce"))
        return func(*args, **(kwargs or {}))


def counted(tokens: int | None) -> tuple[int, int]:
    """Collectives of a forward and of a backward."""
    decoder = tiny_decoder()
    tensor_parallelise(decoder, tensor_mesh(), decoder_plan(TINY))
    for block in decoder.blocks:
        if tokens is not None:
            tile(block.mlp, tokens, num_ranks=2)  # type: ignore[arg-type]
    with Collectives() as forward:
        result = decoder.hidden(torch.arange(LENGTH)[None])
    with Collectives() as backward:
        result.to_local().sum().backward()  # type: ignore[attr-defined]
    return forward.count, backward.count


def test_tiles_gather_once_and_scatter_one_by_one(gloo):
    """Three tiles, of which forward scatters each, and backward gathers each one's gradient."""
    plain, tiled = gloo(2).run(counted, None)[0], gloo(2).run(counted, 4)[0]
    assert tiled[0] - plain[0] == 2 * TINY.num_layers
    assert tiled[1] - plain[1] == 2 * TINY.num_layers


class Inside(nn.Module):
    """Gathers tokens itself, behind a norm that every tensor rank applies to its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gather = nn.RMSNorm(WIDTH), nn.Identity()
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, states: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(self.gather(self.norm(states)))))


def inside(plan: dict[str, Any], states: Tensor) -> None:
    torch.manual_seed(0)
    module = Inside().double()
    tensor_parallelise(module, tensor_mesh(), plan)

    def step() -> dict[str, Tensor]:
        module.zero_grad()
        wanted = states.clone().requires_grad_()
        result = module(wanted)
        result.pow(2).sum().backward()
        placed = {name: one.grad.placements for name, one in module.named_parameters()}  # type: ignore
        placements.append(placed)
        return {"result": result.detach(), "input": wanted.grad, **gradients(module)}  # type: ignore[dict-item]

    placements: list[Any] = []
    expected = step()
    for tokens in (1, 3, 64):
        tile(module, tokens, num_ranks=2)
        assert_close(step(), expected, 1e-12)
    assert all(placed == placements[0] for placed in placements)


def gathered_inside() -> None:
    gather = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    plan = {
        "norm": SequenceParallel(use_local_output=True),
        "gather": gather,
        "up": ColwiseParallel(),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    inside(plan, torch.randn(2, LENGTH // 2, WIDTH, dtype=torch.float64))


def whole_on_every_rank() -> None:
    plan = {"norm": SequenceParallel(sequence_dim=1, use_local_output=True)}
    inside(plan | {"up": ColwiseParallel(), "down": RowwiseParallel()}, torch.randn(2, LENGTH, WIDTH).double())


def uneven() -> str:
    module = Inside()
    tile(module, 4, num_ranks=2)
    with pytest.raises(ValueError) as refused:
        module(torch.randn(1, 5, WIDTH))
    return str(refused.value)


def test_results_that_are_whole_come_back_in_order(gloo):
    gloo(2).run(whole_on_every_rank)


def test_tokens_may_be_gathered_inside(gloo):
    gloo(2).run(gathered_inside)


def test_uneven_parts_are_refused():
    assert "Inside runs in tiles on 5 tokens, which 2 tensor ranks do not share evenly" in uneven()


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, states: Tensor) -> Tensor:
        for block in self.blocks:
            states = block(states)
        return states


def distributed_step(tokens: int | None, how: str, wrapped: bool, part: str = "block") -> dict[str, Tensor]:
    """Gradients of two micro-batches, the first without communication; this rank's own inputs."""
    torch.manual_seed(0)
    model = Stack()
    mesh = init_device_mesh("cpu", (2,))
    for block in model.blocks:
        if tokens is not None:
            tile(block.mlp, tokens)  # type: ignore[arg-type]
        if wrapped:
            checkpoint(block)
        chosen: Any = block if part == "block" else block.mlp
        if how == "replicate":
            replicate(chosen, mesh=mesh)
        else:
            dtype = torch.bfloat16 if how == "bfloat16" else None
            fully_shard(
                chosen, mesh=mesh, reshard_after_forward=True, mp_policy=MixedPrecisionPolicy(param_dtype=dtype)
            )
    (replicate if how == "replicate" else fully_shard)(model, mesh=mesh)  # type: ignore[operator]
    torch.manual_seed(dist.get_rank())
    first, second = torch.randn(2, LENGTH, WIDTH), torch.randn(2, LENGTH, WIDTH)
    with no_gradient_sync(model, True):
        model(first).pow(2).sum().backward()
    for block in model.blocks:
        block.mlp.calls.clear()  # type: ignore[union-attr,operator]
    model(second).pow(2).sum().backward()
    if tokens is not None:
        per_pass = -(-LENGTH // tokens)
        assert [len(block.mlp.calls) for block in model.blocks] == [2 * per_pass] * 3  # type: ignore
    return gradients(model)


def same_gradients(how: str, wrapped: bool, part: str) -> None:
    expected = distributed_step(None, how, wrapped, part)
    assert len(expected) == 3 * 8
    for tokens in (5, 64):
        assert_close(distributed_step(tokens, how, wrapped, part), expected, 3e-2 if how == "bfloat16" else 1e-6)


@pytest.mark.parametrize("part", ["block", "mlp"])
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("how", ["fsdp", "replicate", "bfloat16"])
def test_parameters_that_are_gathered_anew_in_backward(gloo, how, wrapped, part):
    gloo(2).run(same_gradients, how, wrapped, part)


def sharded_inside() -> str:
    module = Block()
    tile(module, 4)
    fully_shard(module.mlp, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    with pytest.raises(ValueError) as refused:
        module(torch.randn(1, 5, WIDTH))
    return str(refused.value)


def test_parts_sharded_by_themselves_are_refused(gloo):
    for message in gloo(2).run(sharded_inside):
        assert "Block runs in tiles, but its part mlp is sharded by itself" in message


def tensor_and_sharded() -> None:
    """Two tensor ranks, and FSDP2 over one rank around them, as the strategy has it for any number."""
    expected = decoder_step(tiny_decoder())
    for reshard in (True, False):
        decoder = tiny_decoder()
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
        tensor_parallelise(decoder, mesh["tensor"], decoder_plan(TINY))
        for block in decoder.blocks:
            tile(block.mlp, 4, num_ranks=2)  # type: ignore[arg-type]
            checkpoint(block)
            fully_shard(block, mesh=mesh["data"], reshard_after_forward=reshard)
        fully_shard(decoder, mesh=mesh["data"])
        assert_close(decoder_step(decoder), expected, 1e-12)


def test_tensor_ranks_and_fsdp_at_once(gloo):
    gloo(2).run(tensor_and_sharded)


def test_tiles_can_be_taken_back_from_a_decoder():
    decoder = tiny_decoder()
    expected = decoder_step(decoder)
    for block in decoder.blocks:
        tile(block.mlp, 5)  # type: ignore[arg-type]
    assert_close(decoder_step(decoder), expected, 1e-12)
    for block in decoder.blocks:
        untile(block.mlp)  # type: ignore[arg-type]
    assert_close(decoder_step(decoder), expected, 0.0)
