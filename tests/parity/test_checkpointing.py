"""What backward keeps changes no number: every policy gives one process's losses and weights, dropout included."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_longctx.memory.policy import Checkpointing
from tests.parity.runs import Run, train_all
from tests.parity.test_training import check

SHORT = Run(optimizer="sgd", steps=3, length=128, dropout=0.3, accumulate=2, documents="unlike")
PLAIN = replace(SHORT, plain=True, documents="none")
FULL = Checkpointing("full")
POLICIES = {
    "full": FULL,
    "selective": Checkpointing("selective"),
    "list": Checkpointing("full", keep=("attention", "mlp.up", "attention_norm"), offload=("attention", "mlp.up")),
    "none but": Checkpointing(recompute=("mlp",)),
    "auto": Checkpointing("auto", budget_gib=1.0),
    "tiles": Checkpointing("selective", tiles={"mlp": 24}),
}
DEGREES = {
    "context 4 as 2x2": (4, dict(context=4, inner_ring=2), "replicate"),
    "head 2 x context 2, fsdp": (4, dict(head=2, context=2), "fsdp"),
    "context 2 x tensor 2": (4, dict(context=2, tensor=2), "fsdp"),
}


@pytest.fixture(scope="module")
def alone(gloo):
    """Each run in one process that keeps everything."""
    return dict(zip((SHORT, PLAIN), gloo(1).run(train_all, [SHORT, PLAIN], timeout=280)[0], strict=True))


def test_one_process_bit_for_bit(gloo, alone):
    runs = [replace(SHORT, checkpointing=options) for name, options in POLICIES.items() if name != "tiles"]
    for result in gloo(1).run(train_all, runs, timeout=280)[0]:
        assert result.losses == alone[SHORT].losses
        assert all((result.weights[name] == weight).all() for name, weight in alone[SHORT].weights.items())


@pytest.mark.parametrize(
    "degrees",
    [
        pytest.param("context 4 as 2x2", marks=pytest.mark.exhaustive),
        pytest.param("head 2 x context 2, fsdp", marks=pytest.mark.exhaustive),
        pytest.param("context 2 x tensor 2", marks=pytest.mark.slow),
    ],
)
def test_the_same_numbers_over_ranks(gloo, alone, degrees):
    world, options, sharding = DEGREES[degrees]
    runs = [replace(SHORT, degrees=options, sharding=sharding, checkpointing=policy) for policy in POLICIES.values()]
    if "tensor" not in options:
        runs.append(replace(PLAIN, degrees=options, sharding=sharding, checkpointing=Checkpointing("full")))
    for run, result in zip(runs, gloo(world).run(train_all, runs, timeout=280)[0], strict=True):
        check(result, alone[PLAIN if run.plain else SHORT], run)
