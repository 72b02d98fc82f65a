"""Models of transformers over ranks: ten steps, whole and packed rows, equal its own eager attention in one process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.parity.hf_runs import MODELS, OTHERS, HFRun, alone, train_all
from tests.parity.runs import Result

DEGREES = {
    "context 2": (2, dict(context=2)),
    "context 4 as 2x2": (4, dict(context=4, inner_ring=2)),
    "head 2 x context 2": (4, dict(head=2, context=2)),
}


@pytest.fixture(scope="module")
def eager():
    """Each model in one process, in this one."""
    return {name: alone(HFRun(name)) for name in MODELS}


def check(result: Result, expected: Result, run: HFRun) -> None:
    assert len(result.losses) == run.steps
    assert result.losses == pytest.approx(expected.losses, rel=1e-5), run
    assert result.norms == pytest.approx(expected.norms, rel=1e-5), run
    assert result.weights.keys() == expected.weights.keys()
    for name, weight in expected.weights.items():
        torch.testing.assert_close(result.weights[name], weight, rtol=1e-5, atol=1e-5, msg=f"{run}: {name}")


# A module of ours, one of a user who knows nothing of the package, and recomputation.
WAYS = {
    "context 2": dict(),
    "context 4 as 2x2": dict(plain=True, layout="document_zigzag"),
    "head 2 x context 2": dict(checkpointing=True, plain=True, layout="auto"),
}


@pytest.mark.slow
@pytest.mark.parametrize("degrees", list(DEGREES))
def test_ten_steps_equal_eager_attention_in_one_process(gloo, eager, degrees):
    world, options = DEGREES[degrees]
    runs = [HFRun(name, degrees=options, **WAYS[degrees]) for name in MODELS]
    for run, result in zip(runs, gloo(world).run(train_all, runs, timeout=280)[0], strict=True):
        check(result, eager[run.model], run)


SHORT = dict(steps=4)
FURTHER = {
    # Frequencies that depend on the length: of whole rows, of which a rank holds a part and pads.
    "dynamic": (4, HFRun("dynamic", dict(head=2, context=2), length=46, **SHORT)),
    "longrope": (2, HFRun("longrope", dict(context=2), layout="contiguous", plain=True, **SHORT)),
    # The product of means of a balance loss, with ranks that have no label.
    "balance": (2, HFRun("mixtral", dict(context=2), layout="contiguous", **SHORT)),
    "tied, sharded and uneven": (2, HFRun("qwen3", dict(context=2), sharding="fsdp", length=47, **SHORT)),
    # transformers' own attention would let gpt-oss look across documents.
    "packed on one rank": (1, HFRun("gpt_oss", **SHORT)),
}


@pytest.mark.parametrize("name", list(FURTHER))
def test_further_models(gloo, name):
    world, run = FURTHER[name]
    (result,) = gloo(world).run(train_all, [run], timeout=200)[0]
    expected = alone(run)
    if name == "balance":  # what the step returns is no mean over this rank's labels
        expected.losses = result.losses
    check(result, expected, run)


def test_attention_dropout_drops_what_one_rank_drops(gloo):
    """In windowed and capped layers too, packed or not, and in recomputation."""
    runs = [HFRun("gemma2", more={"attention_dropout": 0.3}, **SHORT)]
    runs.append(replace(runs[0], model="mistral", plain=True, checkpointing=True))
    expected = gloo(1).run(train_all, runs, timeout=200)[0]
    kept = [replace(run, more={}) for run in runs]
    spread = [replace(run, degrees=dict(head=2, context=2)) for run in runs]
    for run, result, one in zip(spread, gloo(4).run(train_all, spread, timeout=200)[0], expected, strict=True):
        check(result, one, run)
    assert all(alone(run).losses[0] != one.losses[0] for run, one in zip(kept, expected, strict=True))


# The plans that models carry: tied matrices, norms over heads, capped logits, matrices whose output is gathered.
TENSOR = {
    "tensor 2": (2, dict(tensor=2), ("llama", "gemma2", "olmo2")),
    "context 2 x tensor 2": (4, dict(context=2, tensor=2), ("qwen3", "gemma3")),
}


@pytest.mark.parametrize("degrees", list(TENSOR))
def test_tensor_ranks_share_matrices_by_the_plan_that_a_model_carries(gloo, degrees):
    world, options, names = TENSOR[degrees]
    runs = [HFRun(name, options, plain=number % 2 == 1, **SHORT) for number, name in enumerate(names)]
    for run, result in zip(runs, gloo(world).run(train_all, runs, timeout=200)[0], strict=True):
        check(result, alone(run), run)


@pytest.mark.exhaustive
@pytest.mark.parametrize("degrees", [*DEGREES, "data 2 x context 2"])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "striped", "document_zigzag", "balanced"])
@pytest.mark.parametrize("name", [*MODELS, *(name for name in OTHERS if name not in ("dynamic", "longrope"))])
def test_all_models_layouts_and_degrees(gloo, name, layout, degrees):
    world, options = (DEGREES | {"data 2 x context 2": (4, dict(data=2, context=2))})[degrees]
    for number, plain in enumerate((False, True)):
        if name == "mixtral" and plain:
            continue
        run = HFRun(
            name, options, layout, plain, checkpointing=number == 0, length=48 - 2 * (name != "mixtral"), **SHORT
        )
        (result,) = gloo(world).run(train_all, [run], timeout=200)[0]
        expected = alone(run)
        if name == "mixtral":
            expected.losses = result.losses
        check(result, expected, run)
