"""Options of the strategy that reach batches and samplers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_longctx.mixins import CausalLM, LongContextMixin
from lightning_longctx.models import DecoderConfig
from lightning_longctx.plan.communication import Communication
from lightning_longctx.plan.mask import Mask
from lightning_longctx.strategy import LongContextStrategy
from lightning_longctx.strategy.options import declared_masks
from lightning_longctx.strategy.places import sampler_place, sampler_seed
from lightning_longctx.strategy.validate import check_module
from lightning_longctx.topology import Degrees
from lightning_longctx.topology.links import Links


def test_entries_can_be_left_whole_and_padded_with_values() -> None:
    strategy = LongContextStrategy(sequence_dims={"table": None, "bias": -1}, pad_values={"input_ids": 7})
    assert strategy.batch_sharding.sequence_dims == (("table", None), ("bias", -1))
    assert strategy.batch_sharding.pad_values == (("input_ids", 7),)
    with pytest.raises(ValueError, match="pad_values cannot be set for .*labels"):
        LongContextStrategy(pad_values={"labels": 0})


def test_layouts_and_links_reach_batches() -> None:
    strategy = LongContextStrategy(layout="auto", communication=Communication(links=Links(outer_gbits=1.0)))
    assert (strategy.batch_sharding.layout, strategy.batch_sharding.links) == ("auto", Links(outer_gbits=1.0))
    with pytest.raises(ValueError, match="layout='spiral' is unknown; choose auto or one of contiguous, zigzag"):
        LongContextStrategy(layout="spiral")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="sharding='zero'"):
        LongContextStrategy(sharding="zero")  # type: ignore[arg-type]


def test_masks_are_the_module_s() -> None:
    assert declared_masks(nn.Module()) == (Mask(),)
    model = CausalLM(DecoderConfig(num_layers=6, windows=(4, None, 4)))
    assert model.attention_masks == (Mask(window=4), Mask(), Mask(window=4)) * 2
    assert declared_masks(model) == model.attention_masks
    assert LongContextMixin.attention_masks.fget(model) == (Mask(),)  # type: ignore[attr-defined]
    module = nn.Module()
    for wrong in ((), (None,), "causal", Mask()):
        module.attention_masks = wrong
        with pytest.raises(ValueError, match="attention_masks=.* of Module must be a tuple of"):
            declared_masks(module)


def test_samplers_get_the_data_rank_and_the_agreed_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    degrees = Degrees(data=2, context=2)
    places = [sampler_place(degrees, rank, 5) for rank in range(4)]
    assert [place["rank"] for place in places] == [0, 0, 1, 1]
    assert all(place["num_replicas"] == 2 and place["seed"] == 5 for place in places)
    monkeypatch.setenv("PL_GLOBAL_SEED", "11")
    assert sampler_seed() == 11
    monkeypatch.delenv("PL_GLOBAL_SEED")
    assert sampler_seed() == 0


def test_a_parameter_without_dims_is_named() -> None:
    module = nn.Module()
    module.scale = nn.Parameter(torch.ones(()))
    with pytest.raises(ValueError, match=r"parameter scale has no dims.*torch.ones\(1\)"):
        check_module(module, Degrees())
