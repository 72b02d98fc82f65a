"""Means count tokens: in logs, in losses with a count of their own, and whatever the batch looks like."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from lightning_longctx.mixins import LongContextMixin
from lightning_longctx.testing import GlooPool, RankError
from lightning_longctx.topology import Degrees
from tests.mixins.modules import Losses, two_losses, validated

Pools = Callable[[int], GlooPool]


def test_epoch_mean_is_not_weighted_by_the_first_entry(gloo: Pools) -> None:
    [metrics] = gloo(1).run(validated, [(4.0, 4), (12.0, 4)], [3, 9])
    assert metrics["val_loss"] == pytest.approx(2.0, rel=1e-6)


def test_perplexity_comes_from_the_summed_loss(gloo: Pools) -> None:
    [metrics] = gloo(1).run(validated, [(7.0, 7), (3.0, 1)], [3, 9])
    assert metrics["val_loss"] == pytest.approx(1.25, rel=1e-6)
    assert metrics["val_perplexity"] == pytest.approx(math.exp(1.25), rel=1e-6)
    assert metrics["val_perplexity"] == pytest.approx(3.4903, abs=1e-4)


def test_epoch_sums_do_not_drift(gloo: Pools) -> None:
    """In float32 the second batch would vanish beside the first."""
    [metrics] = gloo(1).run(validated, [(2.0**25, 1), (1.0, 1), (-(2.0**25), 1)], [3, 3, 3])
    assert metrics["val_loss"] == pytest.approx(1 / 3, rel=1e-6)


@pytest.mark.parametrize("degrees", [Degrees(), Degrees(context=2)])
def test_a_loss_may_declare_its_own_count(gloo: Pools, degrees: Degrees) -> None:
    if degrees.context > 1:
        with pytest.raises(RankError, match="no attention call"):
            gloo(2).run(two_losses, degrees)
        return
    [one] = gloo(1).run(two_losses, degrees)
    # Each of two data ranks reads two of the four pairs of samples, so a step sees twice as many tokens.
    two = gloo(2).run(two_losses, degrees)[0]
    assert one["scores"].abs().sum() > 0
    assert two["scores"].sum() == pytest.approx(-0.1 * 2, rel=1e-5)  # lr x steps: weights of a mean add to 1
    assert one["scores"].sum() == pytest.approx(-0.1 * 4, rel=1e-5)


def test_several_labels_without_a_count_are_refused(gloo: Pools) -> None:
    with pytest.raises(RankError, match="token_mean"):
        gloo(1).run(two_losses, Degrees(), False)


def test_token_mean_without_a_trainer() -> None:
    module = Losses([])
    total = torch.tensor(6.0, requires_grad=True)
    assert module.token_mean(total, 3).item() == 2.0
    empty = module.token_mean(total * 0, torch.tensor(0))
    empty.backward()
    assert empty.item() == 0.0
    assert total.grad is not None


def test_mixin_is_cooperative() -> None:
    class Base:
        def __init__(self, width: int) -> None:
            self.width = width

    class Mixed(LongContextMixin, Base):
        pass

    assert Mixed(width=3, optimizer=torch.optim.SGD).width == 3
