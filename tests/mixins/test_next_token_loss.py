"""The ready models compute their loss in tiles where their logits are a plain product, and else as they were."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_longctx.loss import TiledLoss, token_cross_entropy
from lightning_longctx.mixins import CausalLM, HuggingFaceModule
from lightning_longctx.models.hugging_face.files import build_model
from lightning_longctx.models.hugging_face.heads import plain_head
from lightning_longctx.sequence import SequenceRecord
from lightning_longctx.topology import Degrees
from tests.mixins.hf_runs import CONFIG, fit
from tests.mixins.modules import TINY

LENGTH, VOCAB = 12, 32


def batch() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCAB, (2, LENGTH), generator=generator)
    labels = tokens.roll(-1, 1)
    labels[:, -1] = -100
    positions = torch.arange(LENGTH).expand(2, -1)
    record = SequenceRecord(length=LENGTH)
    return {"input_ids": tokens, "position_ids": positions, "shift_labels": labels, "sequence": record}


def step(module: Any) -> tuple[Tensor, dict[str, Tensor]]:
    module.zero_grad()
    total, count = module.next_token_loss(batch())
    (total / count).backward()
    return total.detach(), {
        name: each.grad.clone() for name, each in module.named_parameters() if each.grad is not None
    }


def assert_same_step(tiled: Any, whole: Any) -> None:
    (total, gradients), (expected, right) = step(tiled), step(whole)
    torch.testing.assert_close(total, expected, rtol=1e-6, atol=0)
    assert gradients.keys() == right.keys()
    torch.testing.assert_close(gradients, right, rtol=1e-5, atol=1e-5)


def causal(loss: TiledLoss, kind: type[CausalLM] = CausalLM, **shape: Any) -> CausalLM:
    from dataclasses import replace

    torch.manual_seed(0)
    module = kind(replace(TINY, **shape), loss=loss)
    module.configure_model()
    return module


def no_whole_logits(*args: Any) -> None:
    raise AssertionError("whole logits were made")


@pytest.mark.parametrize("tied", [False, True])
def test_the_decoder_never_makes_whole_logits(monkeypatch: pytest.MonkeyPatch, tied: bool) -> None:
    whole = causal(TiledLoss(tile_tokens=None), tie_embeddings=tied)
    expected = step(whole)
    tiled = causal(TiledLoss(tile_tokens=5), tie_embeddings=tied)
    if tiled.decoder.head is not None:
        tiled.decoder.head.register_forward_hook(no_whole_logits)
    monkeypatch.setattr(CausalLM, "__call__", no_whole_logits)
    total, gradients = step(tiled)
    torch.testing.assert_close(total, expected[0], rtol=1e-6, atol=0)
    torch.testing.assert_close(gradients, expected[1], rtol=1e-5, atol=1e-6)


class Halved(CausalLM):
    """A user's: its logits are half the decoder's."""

    def next_token_logits(self, batch: dict[str, Any]) -> Tensor:
        return self(batch) / 2


class Doubled(nn.Linear):
    def forward(self, states: Tensor) -> Tensor:
        return super().forward(states) * 2


def test_logits_of_ones_own_are_heeded() -> None:
    module = causal(TiledLoss(), Halved)
    expected, _ = token_cross_entropy(module(batch()) / 2, batch()["shift_labels"])
    torch.testing.assert_close(step(module)[0], expected)
    replaced = causal(TiledLoss())
    replaced.decoder.head = Doubled(16, VOCAB)  # type: ignore[assignment]
    expected, _ = token_cross_entropy(replaced(batch()), batch()["shift_labels"])
    torch.testing.assert_close(step(replaced)[0], expected)
    with pytest.raises(ValueError, match="loss.kernel=liger needs logits that are a plain product"):
        causal(TiledLoss(kernel="liger"), Halved).next_token_loss(batch())


def small(model_type: str, **more: Any) -> dict[str, Any]:
    """A configuration; sizes that its kind does not know are left out."""
    from transformers import AutoConfig

    shape = CONFIG | {"initializer_range": 0.3, "tie_word_embeddings": False}
    shape |= {"n_embd": 16, "n_head": 4, "n_layer": 2, "n_inner": 24}
    known = AutoConfig.for_model(model_type).to_dict()
    return {name: value for name, value in shape.items() if name in known} | {"model_type": model_type} | more


def hugging_face(config: dict[str, Any], loss: TiledLoss) -> HuggingFaceModule:
    torch.manual_seed(0)
    module = HuggingFaceModule(config, loss=loss)
    module.configure_model()
    return module


PLAIN = {
    "llama": {},
    "qwen3": {"tie_word_embeddings": True},
    "gpt2": {"tie_word_embeddings": True, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "gpt_neox": {},
    "phi": {},
    "gemma2": {"final_logit_softcapping": None},
    "mixtral": {"num_local_experts": 4},
    "granite": {"logits_scaling": 1.0},
}
"""Models whose logits are a product, Phi's with a bias."""
BENT = {"gemma2": {"final_logit_softcapping": 30.0}, "granite": {"logits_scaling": 8.0}, "cohere": {"logit_scale": 0.1}}
"""Models that do something with it."""


@pytest.mark.parametrize("kind", list(PLAIN))
def test_a_plain_head_is_computed_in_tiles(kind: str) -> None:
    config = small(kind, **PLAIN[kind])
    tiled = hugging_face(config, TiledLoss(tile_tokens=5))
    assert plain_head(tiled.model) is tiled.model.get_output_embeddings()
    widths = []
    head = tiled.model.get_output_embeddings()
    head.register_forward_hook(lambda part, args, output: widths.append(output.shape[1]))
    assert_same_step(tiled, hugging_face(config, TiledLoss(tile_tokens=None)))
    assert widths == [3, 1]  # when asked, and then one token a step


@pytest.mark.parametrize("kind", list(BENT))
def test_bent_logits_are_not_taken_for_a_plain_product(kind: str) -> None:
    config = small(kind, **BENT[kind])
    tiled = hugging_face(config, TiledLoss())
    assert plain_head(tiled.model) is None
    assert_same_step(tiled, hugging_face(config, TiledLoss(tile_tokens=None)))
    with pytest.raises(ValueError, match=r"loss.kernel=liger needs logits .* and those of \w+ForCausalLM are not"):
        hugging_face(config, TiledLoss(kernel="liger")).next_token_loss(batch())


def test_a_hook_on_the_head_and_other_modules_are_no_plain_product() -> None:
    module = hugging_face(small("llama"), TiledLoss())
    base = module.model.model
    handle = module.model.lm_head.register_forward_hook(lambda part, args, output: output + 1)
    assert plain_head(module.model) is None and module.model.model is base
    handle.remove()
    assert plain_head(module.model) is not None and module.model.model is base
    module.model.lm_head = nn.Sequential(module.model.lm_head)
    assert plain_head(module.model) is None
    assert plain_head(nn.Linear(2, 2)) is None


class Cooled(HuggingFaceModule):
    """A user's: its logits are half the model's."""

    def next_token_logits(self, batch: dict[str, Any]) -> Tensor:
        return self(batch).logits / 2


def test_ones_own_logits_of_a_hugging_face_model_are_heeded() -> None:
    torch.manual_seed(0)
    module = Cooled(small("llama"))
    module.configure_model()
    expected, _ = token_cross_entropy(module(batch()).logits / 2, batch()["shift_labels"])
    torch.testing.assert_close(step(module)[0], expected)


def test_the_answer_is_asked_for_once_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    name = "lightning_longctx.mixins.hugging_face.plain_head"
    monkeypatch.setattr(name, lambda model: asked.append(model) or plain_head(model))
    module = hugging_face(small("llama"), TiledLoss())
    step(module), step(module)
    assert len(asked) == 1
    module.model = build_model(None, module.config, "float32")
    step(module)
    assert len(asked) == 2


def gathered_apart() -> list[bool]:
    """Whether losses are computed with weights that nobody gathers."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    module, other = causal(TiledLoss()), hugging_face(small("llama"), TiledLoss())
    expected = [step(each)[0] for each in (module, other)]
    fully_shard(module.decoder.head, mesh=mesh)
    fully_shard(module.decoder, mesh=mesh)
    fully_shard(other.model.lm_head, mesh=mesh)
    fully_shard(other.model, mesh=mesh)
    found = [each.next_token_loss(batch())[0].detach() for each in (module, other)]
    return [torch.allclose(*pair) for pair in zip(found, expected, strict=True)]


def test_parameters_that_fsdp2_gathers_in_calls_are_used_in_calls(gloo) -> None:
    assert gloo(2).run(gathered_apart) == [[True, True]] * 2


FITS = [
    (1, Degrees(), "replicate", CONFIG),
    (2, Degrees(context=2), "fsdp", CONFIG),
    (2, Degrees(tensor=2), "replicate", CONFIG | {"vocab_size": 33}),
    (2, Degrees(context=2), "replicate", small("mixtral", num_local_experts=4, output_router_logits=True)),
]


@pytest.mark.parametrize(("world", "degrees", "sharding", "config"), FITS)
def test_a_run_in_tiles_logs_what_whole_logits_do(gloo, world, degrees, sharding, config) -> None:
    """With tied embeddings over unequal tensor ranks, and with a balance loss."""
    [expected] = gloo(1).run(fit, config, Degrees(), loss=TiledLoss(tile_tokens=None))
    data_ranks = world // (degrees.context * degrees.tensor)
    assert data_ranks == 1
    for steps, validations, after in gloo(world).run(
        fit, config, degrees, None, sharding, loss=TiledLoss(tile_tokens=3)
    ):
        assert steps == pytest.approx(expected[0], rel=1e-5)
        assert validations[-1] == pytest.approx(expected[1][-1], rel=1e-5)
        assert after == pytest.approx(expected[2], rel=1e-5)


@pytest.mark.parametrize("kind", ["decoder", "hugging face"])
def test_a_kernel_that_cannot_run_is_refused_before_the_model_is_built(kind: str) -> None:
    from lightning.pytorch import Trainer

    loss = TiledLoss(kernel="liger")
    module = CausalLM(TINY, loss=loss) if kind == "decoder" else HuggingFaceModule(CONFIG, loss=loss)
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, barebones=False)
    with pytest.raises(ValueError, match="loss.kernel=liger needs CUDA, but this run is on cpu"):
        trainer.validate(module, torch.utils.data.DataLoader([batch()], batch_size=None))  # type: ignore[arg-type]
