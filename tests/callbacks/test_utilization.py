"""B48: FLOPs of a token, and the share of the devices' peak: each token once, whatever ranks share its sequence."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel

from lightning_longctx import CausalLM, Degrees, HuggingFaceModule
from lightning_longctx.callbacks import ThroughputCallback
from lightning_longctx.callbacks.utilization import (
    ModelWork,
    document_lengths,
    model_work,
    num_multiplied,
    utilization,
    visible_pairs,
)
from lightning_longctx.models import DecoderConfig
from lightning_longctx.plan.mask import Mask
from lightning_longctx.sequence import SequenceRecord
from tests.callbacks.tiny import TOKENS, VOCABULARY, Tiny, fit

CAUSAL, FULL = Mask(), Mask(causal=False)


def work(mask: Mask) -> ModelWork:
    return ModelWork(100_000, num_heads=4, head_width=16, masks=(mask,) * 2)


def test_the_example():
    """Of 1,024 tokens: causal, full, and four documents of 256."""
    assert work(CAUSAL).flops_per_token([1024]) == 1_386_432
    assert work(FULL).flops_per_token([1024]) == 2_172_864
    assert work(CAUSAL).flops_per_token([256] * 4) == 796_608
    flops = work(CAUSAL).flops([1024] * 8)
    assert utilization(flops, 0.05, 2, 1e12) == pytest.approx(0.11358, abs=5e-6)


def test_windows_see_less():
    assert visible_pairs(100, Mask(window=10)) == 10 * 100 - 50
    assert visible_pairs(100, Mask(window=100)) == visible_pairs(100, Mask(window=1000)) == visible_pairs(100, CAUSAL)
    exact = sum(min(query + 1, 10) for query in range(100))
    assert visible_pairs(100, Mask(window=10)) == pytest.approx(exact, rel=0.01)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_batch_has_its_documents_whatever_ranks_share_it(ranks):
    def record(**more: Any) -> SequenceRecord:
        return SequenceRecord(length=16, num_ranks=ranks, **more)

    assert document_lengths(record(), 3) == [16, 16, 16]
    assert document_lengths(record(documents=(0, 5, 16)), 2) == [5, 11, 5, 11]
    assert document_lengths(record(documents=(0, 5, 16, 32), num_rows=2), 2) == [5, 11, 16]


def test_looked_up_parameters_are_not_multiplied():
    config = DecoderConfig(vocab_size=32, width=16, num_layers=1, num_heads=4)
    counts = {}
    for tied in (False, True):
        module = CausalLM(DecoderConfig(**{**config.to_dict(), "tie_embeddings": tied}))
        module.configure_model()
        counts[tied] = num_multiplied(module)
        assert model_work(module) == ModelWork(counts[tied], 4, 4, (CAUSAL,))
    assert counts[True] == counts[False]
    both = nn.ModuleDict({"embedding": nn.Embedding(8, 4), "head": nn.Linear(4, 8, bias=False)})
    assert num_multiplied(both) == 32
    both["head"].weight = both["embedding"].weight
    assert num_multiplied(both) == 32


def test_a_hugging_face_model_says_what_it_costs():
    shape = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, vocab_size=32)
    module = HuggingFaceModule({"model_type": "llama", "head_dim": 8, **shape})
    module.configure_model()
    found = model_work(module)
    assert (found.num_heads, found.head_width, len(found.masks)) == (4, 8, 2)


def test_a_module_that_does_not_say_it_is_refused():
    with pytest.raises(ValueError, match="peak_flops is set, but LightningModule does not say.*attention_head_width"):
        model_work(LightningModule())
    with pytest.raises(ValueError, match="peak_flops=0"):
        ThroughputCallback(peak_flops=0)


class Described(Tiny):
    attention_heads, attention_head_width, attention_masks = (2, 2), 4, (CAUSAL,)

    def tensor_parallel_plan(self) -> dict[str, Any]:
        return {"head": ColwiseParallel(output_layouts=Replicate())}


def last_logged(folder: str, degrees: Degrees) -> dict[str, float]:
    """Of the last of four steps; a peak of 1e6 FLOPs per second."""
    callbacks: list[Callback] = [ThroughputCallback(peak_flops=1e6)]
    trainer = fit(folder, degrees, 4, callbacks, module=Described(), max_epochs=1, log_every_n_steps=1)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize(("ranks", "degrees"), [(1, Degrees()), (2, Degrees(context=2)), (2, Degrees(tensor=2))])
def test_it_is_logged_for_all_devices_together(gloo, tmp_path, ranks, degrees):
    multiplied = 8 * 24 + 24 + 8 * VOCABULARY + VOCABULARY
    flops = 6 * multiplied * TOKENS + 12 * 2 * 4 * TOKENS**2 / 2
    for found in gloo(ranks).run(last_logged, str(tmp_path), degrees):
        assert found["mfu"] == pytest.approx(flops / found["step_seconds"] / (ranks * 1e6), rel=1e-5)
