"""Tiny random models of transformers: ten steps under the strategy, and the same by hand in one process."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_longctx import Degrees, HuggingFaceModule, LongContextStrategy
from lightning_longctx.batch.labels import shift_labels
from lightning_longctx.batch.positions import document_starts
from lightning_longctx.models.hugging_face.files import build_model, checkpoint_layers, read_config
from lightning_longctx.strategy.gradients.norms import whole
from lightning_longctx.topology import axis_rank
from tests.parity.runs import Recorder, Result, packed_positions

VOCAB, LENGTH, STEPS, ROWS = 64, 48, 10, 2
SHAPE: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    initializer_range=0.2,  # scores and soft caps that matter
    pad_token_id=None,
)
ALTERNATE = ["sliding_attention", "full_attention"]
MODELS: dict[str, dict[str, Any]] = {
    "llama": dict(model_type="llama"),
    "qwen3": dict(model_type="qwen3", tie_word_embeddings=True),
    "gemma2": dict(
        model_type="gemma2",
        sliding_window=9,
        layer_types=ALTERNATE,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=10.0,
        query_pre_attn_scalar=4,
    ),
    "gemma3": dict(model_type="gemma3_text", sliding_window=7, layer_types=ALTERNATE, query_pre_attn_scalar=16),
    "mistral": dict(model_type="mistral", sliding_window=11),
    "gpt_oss": dict(
        model_type="gpt_oss", sliding_window=5, layer_types=ALTERNATE, num_local_experts=4, num_experts_per_tok=2
    ),
}
FACTORS = {"short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [2.0, 4.0, 6.0, 9.0]}
OTHERS: dict[str, dict[str, Any]] = {
    "dynamic": dict(
        model_type="llama",
        max_position_embeddings=16,
        rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
    ),
    "longrope": dict(
        model_type="phi3",
        rope_parameters=dict(rope_type="longrope", rope_theta=1e4, original_max_position_embeddings=32, **FACTORS),
        original_max_position_embeddings=32,
    ),
    "mixtral": dict(model_type="mixtral", num_local_experts=4, output_router_logits=True, router_aux_loss_coef=0.5),
    "gpt2": dict(model_type="gpt2", attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0),
    "olmo2": dict(model_type="olmo2"),
    "qwen2": dict(model_type="qwen2", use_sliding_window=True, sliding_window=9, max_window_layers=1),
    "starcoder2": dict(model_type="starcoder2", sliding_window=9, residual_dropout=0.0, embedding_dropout=0.0),
    "cohere2": dict(model_type="cohere2", sliding_window=9, layer_types=ALTERNATE),
}


@dataclass(frozen=True)
class HFRun:
    """One run; odd steps have packed rows, each row its own documents."""

    model: str
    degrees: dict[str, Any] = field(default_factory=dict, hash=False)
    layout: str = "zigzag"
    plain: bool = False
    checkpointing: bool = False
    sharding: str = "replicate"
    more: dict[str, Any] = field(default_factory=dict, hash=False)
    steps: int = STEPS
    length: int = LENGTH
    lr: float = 0.1

    @property
    def config(self) -> dict[str, Any]:
        from transformers import AutoConfig

        shape = SHAPE | (MODELS | OTHERS)[self.model] | self.more
        known = AutoConfig.for_model(shape["model_type"])
        return {key: value for key, value in shape.items() if key == "model_type" or hasattr(known, key)}


class PlainHF(LightningModule):
    """What a user writes who knows nothing of the package: a model of transformers and its own loss."""

    def __init__(self, config: dict[str, Any], checkpointing: bool, lr: float) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"lm": build_model(None, read_config(config, {}), "float32")})
        self.lr = lr
        if checkpointing:
            checkpoint_layers(self.inner["lm"])

    def training_step(self, batch: dict[str, Any]) -> Tensor:
        labels = batch["shift_labels"]
        where = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"]}
        return self.inner["lm"](**where, labels=labels, shift_labels=labels).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def build(run: HFRun) -> Any:
    """The model with its initial weights: the same in every process."""
    torch.manual_seed(1)
    model = build_model(None, read_config(run.config, {}), "float32")
    for name, weight in model.named_parameters():
        if name.endswith("sinks"):
            nn.init.normal_(weight)
    return model


def samples(run: HFRun) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for index in range(run.steps * ROWS):
        tokens = torch.randint(VOCAB, (run.length,), generator=generator)
        labels = tokens.where(torch.rand(run.length, generator=generator) > 0.3, -100)
        if index % 3 == 0:
            labels[run.length // 4 :] = -100
        packed = index // ROWS % 2
        positions = packed_positions(run.length, index) if packed else torch.arange(run.length)
        made.append({"input_ids": tokens, "labels": labels, "position_ids": positions})
    return made


def alone(run: HFRun) -> Result:
    """By hand: no Lightning, transformers' own eager attention, whole rows."""
    model = build(run)
    model.set_attn_implementation("eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=run.lr)
    losses, norms = [], []
    rows = samples(run)
    for step in range(run.steps):
        batch = {key: torch.stack([row[key] for row in rows[step * ROWS : (step + 1) * ROWS]]) for key in rows[0]}
        positions = batch["position_ids"]
        labels = shift_labels(batch["labels"], document_starts(positions))
        outputs = model(
            input_ids=batch["input_ids"],
            position_ids=positions,
            attention_mask=eager_masks(model, positions) if run.model == "gpt_oss" else None,
            use_cache=False,
        )
        loss = F.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten())
        if model.config.to_dict().get("output_router_logits"):
            loss = loss + model.router_aux_loss_coef * outputs.aux_loss
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.item())
        norms.append(float(nn.utils.get_total_norm([w.grad for w in model.parameters() if w.grad is not None])))
        optimizer.step()
    return Result(losses, norms, {name: weight.detach() for name, weight in model.named_parameters()})


def eager_masks(model: Any, positions: Tensor) -> dict[str, Tensor]:
    """Packed masks for gpt-oss, which would make ones that know nothing of documents."""
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

    states = model.get_input_embeddings()(torch.zeros_like(positions))
    known = dict(config=model.config, inputs_embeds=states, attention_mask=None, cache=None, position_ids=positions)
    return {
        "full_attention": create_causal_mask(**known),
        "sliding_attention": create_sliding_window_causal_mask(**known),
    }


def train(run: HFRun) -> Result:
    """Fit on this rank's part of the world."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    degrees = Degrees(**run.degrees).resolve(world)
    module: Any
    if run.plain:
        module = PlainHF(run.config, run.checkpointing, run.lr)
        inner = module.inner["lm"]
    else:
        sgd = partial(torch.optim.SGD, lr=run.lr)
        module = HuggingFaceModule(run.config, gradient_checkpointing=run.checkpointing, optimizer=sgd)
        module.configure_model()
        inner = module.model
    inner.load_state_dict(build(run).state_dict())
    recorder = Recorder()
    trainer = Trainer(
        accelerator="cpu",
        devices=world,
        strategy=LongContextStrategy(degrees, run.layout, sharding=run.sharding),  # type: ignore[arg-type]
        max_steps=run.steps,
        callbacks=[recorder],
        logger=False,
        use_distributed_sampler=False,  # it would shuffle
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    rows = samples(run)[axis_rank(degrees, trainer.global_rank, "data") :: degrees.data]
    trainer.fit(module, DataLoader(rows, batch_size=ROWS // degrees.data))
    weights = {name: whole(weight.detach()).clone() for name, weight in inner.named_parameters()}
    return Result(recorder.losses, recorder.norms, weights)


def train_all(runs: list[HFRun]) -> list[Result]:
    """Several runs in one call; rank 0's results travel back."""
    results = [train(run) for run in runs]
    return results if dist.get_rank() == 0 else []
