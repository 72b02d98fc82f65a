"""Models of transformers are found wherever they are, set to our attention for a step, and then as before."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lightning_longctx.attention.op import rings_run
from lightning_longctx.models.hugging_face.attention import register
from lightning_longctx.models.hugging_face.config import attention_heads, attention_masks, config_refusal
from lightning_longctx.models.hugging_face.files import build_model, read_config
from lightning_longctx.models.hugging_face.whole import check_models, find_models, refusal, whole_models
from lightning_longctx.plan.mask import Mask
from lightning_longctx.strategy.validate import check_module
from lightning_longctx.topology import Degrees
from tests.models.hf_models import PACKED, SHAPE, SPREAD, tiny, tokens


def small(kind: str, **more):
    """A model that has fewer options than ``tiny`` gives."""
    shape = {key: SHAPE[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")}
    return build_model(None, read_config(shape | {"model_type": kind} | more, {}), "float32")


class Holder(nn.Module):
    """Has models as a child, in lists of modules, and hidden from the parameters in a list, a dict and a cycle."""

    def __init__(self, models: list) -> None:
        super().__init__()
        self.child = nn.Sequential(nn.Linear(2, 2), models[0])
        self.many = nn.ModuleList([models[1]])
        self.hidden = [1, [models[2], models[0]]]
        self.by_name = {"teacher": (models[3],)}
        self.data = [*range(5000), models[4]]  # too long a list to be looked through
        self.hidden.append(self.hidden)


def test_models_are_found_once_wherever_they_are():
    models = [tiny() for _ in range(5)]
    found = find_models(Holder(models))
    assert {id(model) for model in found} == {id(model) for model in models[:4]} and len(found) == 4
    assert find_models(nn.Linear(2, 2)) == []
    assert find_models(models[0]) == [models[0]]


def names(model) -> set:
    return {part.config._attn_implementation for part in model.modules() if hasattr(part, "config")}


def test_attention_is_ours_while_a_step_runs_and_then_as_before():
    model, other = tiny(), tiny("gpt_oss", num_local_experts=2, num_experts_per_tok=1)
    model.set_attn_implementation("eager")
    both, hooks = nn.ModuleList([model, other]), len(model._forward_pre_hooks)
    with whole_models(both, [PACKED]):
        assert names(model) == names(other) == {"longctx"}
        assert len(model._forward_pre_hooks) == hooks + 1
    assert names(model) == {"eager"} and names(other) == {"eager"} and len(model._forward_pre_hooks) == hooks
    with pytest.raises(RuntimeError), whole_models(both, [SPREAD]):
        assert names(model) == {"longctx"}
        raise RuntimeError
    assert names(model) == {"eager"} and len(model._forward_pre_hooks) == hooks


def test_one_rank_keeps_its_own_attention_where_the_numbers_are_the_same():
    whole = SPREAD.__class__(length=8)
    plain, dropping = tiny(), tiny(attention_dropout=0.5)
    encoder = small("bert", attention_probs_dropout_prob=0.5).train()
    others = [small("gpt2", attn_pdrop=0.5), small("roberta", is_decoder=True, attention_probs_dropout_prob=0.5)]
    both = nn.ModuleList([plain, encoder, dropping, *others]).eval()
    with whole_models(both, [whole]):
        assert all(names(model) == {"sdpa"} for model in both)
    both[1:].train()
    with whole_models(both, [whole]):
        assert names(plain) == names(encoder) == {"sdpa"}
        assert all(names(model) == {"longctx"} for model in both[2:])
    for model in others:
        model.config.attn_pdrop = model.config.attention_probs_dropout_prob = 0.0
        with whole_models(model, [whole]):
            assert names(model) == {"sdpa"}
    with whole_models(plain, []):
        assert names(plain) == {"sdpa"}


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2", "gpt_oss", "gemma4_text"])
def test_documents_do_not_see_each_other_on_one_rank(kind):
    """Each document's logits are those of the document alone."""
    more = {"sliding_window": 3} if kind != "llama" else {}
    if kind == "gemma4_text":  # the second half takes keys and values of the first, and cuts masks to kept tokens
        alternate = ["sliding_attention", "full_attention"] * 2
        more |= dict(num_hidden_layers=4, layer_types=alternate, num_kv_shared_layers=2)
        more |= dict(vocab_size_per_layer_input=32, hidden_size_per_layer_input=4)
    model = tiny(kind, **more)
    batch = tokens(8)
    batch["position_ids"] = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    before = rings_run()
    with whole_models(model, [PACKED]):
        packed = model(**batch, sequence=PACKED).logits
        assert rings_run() == before + model.config.num_hidden_layers
        assert torch.equal(model(**batch).logits, packed)  # by the number of tokens
    parts = [model(input_ids=batch["input_ids"][:, part]).logits for part in (slice(0, 3), slice(3, 8))]
    torch.testing.assert_close(packed, torch.cat(parts, dim=1), rtol=1e-5, atol=1e-5)


def test_the_base_model_may_be_called_by_itself():
    model, batch = tiny(), tokens(8)
    batch["position_ids"] = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    with whole_models(model, [PACKED]):
        states = model.model(**batch).last_hidden_state
        torch.testing.assert_close(model.lm_head(states), model(**batch).logits)


REFUSED = {
    "ForSequenceClassification": ("AutoModelForSequenceClassification", {}, "reads the last token"),
    "mamba": ("AutoModelForCausalLM", {"model_type": "mamba", "state_size": 4}, "state from token to token"),
    "bart": ("AutoModel", {"model_type": "bart", "d_model": 16}, "is_encoder_decoder=true"),
    "bloom": ("AutoModelForCausalLM", {"model_type": "bloom", "n_head": 4}, "do not look up their attention"),
    "encoder": ("AutoModel", {"model_type": "bert", "is_decoder": False}, "is_decoder=false"),
    "no positions": ("AutoModelForCausalLM", {"model_type": "bart", "d_model": 16}, "takes no position_ids"),
    "a mask of its own": ("AutoModelForCausalLM", {"model_type": "biogpt"}, "makes an attention_mask itself"),
    "places in the shard": (
        "AutoModelForCausalLM",
        {"model_type": "llama4_text", "layer_types": ["full_attention"] * 2, "no_rope_layers": [1, 0]},
        "attn_temperature_tuning=true .*0 in no_rope_layers",
    ),
    "bidirectional": ("AutoModelForCausalLM", {"is_causal": False}, "is_causal=false"),
    "chunked": (
        "AutoModelForCausalLM",
        {"model_type": "qwen3", "layer_types": ["chunked_attention", "full_attention"]},
        "layer_types with chunked_attention",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_models_that_cannot_are_refused_before_training(case):
    import transformers

    auto, more, reason = REFUSED[case]
    entries = {"model_type": "llama"} | more
    if entries["model_type"] in ("llama", "qwen3", "llama4_text"):
        entries = SHAPE | entries
    kind = entries.pop("model_type")
    config = transformers.AutoConfig.for_model(kind, **entries)
    for name, value in dict(num_hidden_layers=1, encoder_layers=1, decoder_layers=1, vocab_size=32).items():
        if kind not in ("qwen3", "llama4_text") and hasattr(config, name):
            setattr(config, name, value)
    holder = nn.ModuleList([nn.Linear(1, 1), getattr(transformers, auto).from_config(config)])
    before = names(holder[1])
    with pytest.raises(ValueError, match=f"cannot attend over ranks .context=2.: .*{reason}.*context=1 and head=1"):
        check_models(holder, Degrees(context=2))
    assert names(holder[1]) == before
    with pytest.raises(ValueError, match="cannot attend over ranks"):
        check_module(holder, Degrees(context=2))  # which the strategy calls
    check_models(holder, Degrees())
    with whole_models(holder, [PACKED]):
        assert names(holder[1]) == before


def test_models_that_look_like_refused_ones_are_not():
    full = ["full_attention"] * 2
    assert refusal(tiny("llama4_text", layer_types=full, no_rope_layers=[1, 1])) is None
    assert refusal(tiny("llama4_text", layer_types=full, no_rope_layers=[1, 0], attn_temperature_tuning=False)) is None
    assert refusal(small("gpt_neox")) is None  # is_decoder=false, and causal
    assert refusal(small("opt", word_embed_proj_dim=16)) is None  # makes a mask for its positions only


@pytest.mark.parametrize("kept", ["plain object", "long list"])
def test_a_model_that_is_not_found_is_refused_when_it_is_called(kept):
    """With eager attention it would see this rank's tokens only, and say nothing."""
    holder, teacher = nn.ModuleList([tiny()]), tiny()
    teacher.set_attn_implementation("eager")
    holder.hidden = SimpleNamespace(teacher=teacher) if kept == "plain object" else [*range(5000), teacher]  # type: ignore[assignment]
    batch = {key: value[:, :4] for key, value in tokens(8).items()}
    for module in (holder, nn.Linear(1, 1)):
        with whole_models(module, [SPREAD]), pytest.raises(ValueError, match="LlamaForCausalLM.*self.teacher = model"):
            teacher(**batch)
    with pytest.raises(ValueError, match="LlamaModel"), whole_models(holder, [SPREAD]):
        teacher.model(**batch)
    before = teacher(**batch).logits
    with whole_models(holder, [PACKED]):  # one rank has it all
        assert torch.equal(teacher(**batch).logits, before)


def test_a_version_without_the_mask_registry_is_refused(monkeypatch):
    import transformers

    monkeypatch.setitem(
        sys.modules, "transformers", SimpleNamespace(AttentionInterface=transformers.AttentionInterface)
    )
    with pytest.raises(ValueError, match="pip install --upgrade 'transformers>=5'"):
        register()


def test_heads_must_fit_the_degree():
    check_models(tiny(), Degrees(context=2, head=4))
    with pytest.raises(ValueError, match="head=3"):
        check_models(tiny(), Degrees(head=3))


def test_a_model_that_fits_is_left_as_it_was():
    model = tiny("gemma3_text")
    assert refusal(model) is None
    assert names(model) == {"sdpa"}


def test_configurations_say_what_the_layers_see():
    def config(kind, **more):
        return read_config(SHAPE | {"model_type": kind} | more, {})

    layers = ["sliding_attention", "full_attention"]
    assert attention_masks(config("llama")) == (Mask(), Mask())
    assert attention_masks(config("mistral", sliding_window=5)) == (Mask(window=5),) * 2
    assert attention_masks(config("mistral", sliding_window=None)) == (Mask(),) * 2
    assert attention_masks(config("gemma2", sliding_window=7, layer_types=layers)) == (Mask(window=7), Mask())
    assert attention_masks(config("gpt_oss", sliding_window=3, layer_types=layers)) == (Mask(window=3), Mask())
    assert attention_heads(config("llama")) == (4, 2)
    assert config_refusal(config("llama")) is None
    assert "output_attentions" in str(config_refusal(config("llama", output_attentions=True)))
