"""Plans for tensor ranks: what is refused before anything is cut, and how often tensor ranks talk."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils.data import DataLoader

from lightning_longctx import CausalLM, Degrees, LongContextStrategy
from lightning_longctx.loss import token_cross_entropy
from lightning_longctx.models import Decoder, DecoderConfig
from lightning_longctx.models.hugging_face.tensor_plan import hugging_face_plans
from lightning_longctx.models.tensor_plan import decoder_plan
from lightning_longctx.strategy.parameters.tensor_parallel import overlap, tensor_parallelise, tensor_plan
from tests.cases.tiny import TINY, make_trainer, samples
from tests.models.hf_models import tiny
from tests.strategy.modules import Plain


class Declared(nn.Module):
    def __init__(self, plan: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(4))
        self.plan = plan

    def tensor_parallel_plan(self) -> Any:
        return self.plan


@pytest.mark.parametrize(
    ("plan", "parts"),
    [
        ({}, ["tensor=2", "Declared", "tensor_parallel_plan", "tensor=1"]),
        ({"layer.*": ColwiseParallel()}, ["'layer.*'", "no submodule"]),
        ({"layers": Shard(0)}, ["'layers'", "no parameter"]),
        ({"*": ColwiseParallel()}, ["'*'", "no submodule"]),  # also means the parameter
        ({"layers.*": "colwise"}, ["'colwise'", "'layers.*'", "Shard(dim)"]),
        ({"layers.*.weight": ColwiseParallel()}, ["no submodule"]),
    ],
)
def test_plans_that_do_not_fit_are_refused(plan, parts):
    with pytest.raises(ValueError) as refused:
        tensor_plan(Declared(plan), 2)
    assert all(part in str(refused.value) for part in parts), refused.value


def test_a_width_that_does_not_divide_is_refused_by_name():
    module = CausalLM(replace(TINY, mlp_width=33))
    module.configure_model()
    with pytest.raises(ValueError, match=r"tensor=2 does not divide the 33 inputs of decoder\.blocks\.0\.mlp\.down"):
        tensor_plan(module, 2)


def test_names_match_part_by_part():
    module = Declared({"layers.*": ColwiseParallel(), "scale": Shard(0)})
    assert set(tensor_plan(module, 2)) == {"layers.*", "scale"}
    assert tensor_plan(Declared({"nonsense": ColwiseParallel()}), 1) == {}


def test_a_plain_module_is_refused_by_every_rank(gloo):
    for message in gloo(2).run(refused_plain):
        assert "tensor=2, but Plain does not say how" in message


def refused_plain() -> str:
    with pytest.raises(ValueError) as refused:
        make_trainer(Degrees(tensor=2)).fit(Plain(), DataLoader(samples(1)))  # type: ignore[arg-type]
    return str(refused.value)


class Holder(LightningModule):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.held = model


def without_plan() -> Any:
    model = tiny()
    model.tp_plan = {}
    return model


@pytest.mark.parametrize(
    ("model", "parts"),
    [
        (lambda: tiny("mixtral", num_local_experts=2), ["MixtralForCausalLM", "moe_tp_experts", "tensor=1"]),
        (lambda: without_plan(), ["LlamaForCausalLM carries no tensor plan", "tensor=1"]),
        (lambda: [tiny()], ["LlamaForCausalLM", "list or dict", "attribute"]),
    ],
)
def test_models_whose_plan_cannot_be_followed_are_refused(model, parts):
    with pytest.raises(ValueError) as refused:
        tensor_plan(Holder(model()), 2)
    assert all(part in str(refused.value) for part in parts), refused.value


def test_plans_of_models_get_the_name_of_their_place():
    plan = hugging_face_plans(Holder(nn.ModuleDict({"lm": tiny("qwen3")})))
    assert "held.lm.model.layers.*.self_attn.q_norm" in plan and "held.lm.lm_head" in plan


def half_tied() -> str:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    module = nn.Module()
    module.embedding, module.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
    module.head.weight = module.embedding.weight
    with pytest.raises(ValueError) as refused:
        tensor_parallelise(module, mesh, {"head": ColwiseParallel()})
    return str(refused.value)


def test_a_tied_matrix_must_be_cut_in_both_places(gloo):
    for message in gloo(2).run(half_tied):
        assert "are one parameter" in message and "not at all" in message


def tied_and_frozen() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    module = nn.Module()
    module.embedding, module.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
    module.head.weight = module.embedding.weight
    module.other = nn.Linear(4, 4).requires_grad_(False)
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(),
        "other": ColwiseParallel(),
    }
    tensor_parallelise(module, mesh, plan)
    assert module.head.weight is module.embedding.weight
    assert isinstance(module.head.weight, DTensor) and module.head.weight.placements == (Shard(0),)
    assert module.head.weight.requires_grad
    assert not module.other.weight.requires_grad and not module.other.bias.requires_grad


def test_ties_and_frozen_parameters_stay(gloo):
    gloo(2).run(tied_and_frozen)


def collectives(num_layers: int, tied: bool) -> tuple[dict[str, int], dict[str, int]]:
    """Of a forward and of a backward, by kind."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    config = DecoderConfig(33, 16, num_layers, num_heads=4, num_kv_heads=2, tie_embeddings=tied)
    decoder = Decoder(config)
    tensor_parallelise(decoder, mesh, decoder_plan(config))
    tokens = torch.randint(33, (1, 8))
    counts = []
    with CommDebugMode() as forward:
        total, _ = token_cross_entropy(decoder(tokens), tokens)
    with CommDebugMode() as backward:
        total.backward()
    for mode in (forward, backward):
        counts.append({str(op).rpartition(".")[2]: count for op, count in mode.get_comm_counts().items()})
    return counts[0], counts[1]


@pytest.mark.parametrize("tied", [True, False])
def test_tokens_are_gathered_once_and_sums_scattered_once_a_matrix_pair(gloo, tied):
    """Two pairs a layer; one more for the embedding and the head, whose loss takes two small sums."""
    for forward, backward in gloo(2).run(collectives, 2, tied):
        once = {"all_gather_into_tensor": 2 * 2 + 1, "reduce_scatter_tensor": 2 * 2 + 1}
        assert forward == once | {"allreduce_": 2}
        assert backward == once


@pytest.mark.parametrize("wrong", [dict(async_tensor_parallel=True)])
def test_overlap_needs_tensor_ranks(wrong):
    with pytest.raises(ValueError, match="async_tensor_parallel=true needs tensor ranks: set degrees.tensor above 1"):
        LongContextStrategy(**wrong)


def test_overlap_needs_cuda_and_compiled_layers():
    module = CausalLM(TINY)
    module.configure_model()
    with pytest.raises(ValueError, match="needs CUDA, but this run is on cpu"):
        overlap(module, torch.device("cpu"))
    with pytest.raises(ValueError, match="no part of CausalLM is compiled"):
        overlap(module, torch.device("cuda"))


def test_ranks_hold_a_part_of_every_matrix(gloo):
    for held in gloo(2).run(held_numbers):
        assert held["matrices"] <= 0.51
        assert held["norms"] == 1.0


def held_numbers() -> dict[str, float]:
    """Share of the elements of matrices and of norms that this rank holds."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor",))
    decoder = Decoder(TINY)
    tensor_parallelise(decoder, mesh, decoder_plan(TINY))
    shares: dict[str, list[int]] = {"matrices": [0, 0], "norms": [0, 0]}
    for name, weight in decoder.named_parameters():
        assert isinstance(weight, DTensor), name
        kind = shares["norms" if "norm" in name else "matrices"]
        kind[0] += weight.to_local().numel()
        kind[1] += weight.numel()
    return {name: held / every for name, (held, every) in shares.items()}
