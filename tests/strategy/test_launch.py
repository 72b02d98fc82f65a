"""Wrong numbers of processes are refused before anything communicates (by torchrun itself: ``tests/recipes``)."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from lightning.fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from lightning.pytorch import Trainer

from lightning_longctx.strategy import LongContextStrategy
from lightning_longctx.strategy.launch import check_launch
from lightning_longctx.testing import GlooPool
from lightning_longctx.topology import Degrees


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("torchrun")
@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("environment", [TorchElasticEnvironment, LightningEnvironment])
def test_other_count_than_devices(environment: type, devices: int) -> None:
    with pytest.raises(ValueError, match=rf"trainer.devices={devices} .* runs 2 processes. Start {devices}"):
        check_launch(environment(), devices, 1)


@pytest.mark.usefixtures("torchrun")
def test_the_right_count_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    check_launch(TorchElasticEnvironment(), 2, 1)
    monkeypatch.setenv("LOCAL_RANK", "0")
    check_launch(TorchElasticEnvironment(), 1, 2)


def test_lightning_launches_what_it_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    check_launch(LightningEnvironment(), 8, 2)


def refusal() -> str:
    """What a Trainer says to a process that torchrun has started; the pool has set the other variables."""
    os.environ["TORCHELASTIC_RUN_ID"] = "one"
    try:
        Trainer(strategy=LongContextStrategy(Degrees(context=2)), accelerator="cpu", devices="auto", logger=False)
    except ValueError as error:
        return str(error)
    return ""


def test_every_rank_refuses_by_itself(gloo: Callable[[int], GlooPool]) -> None:
    """Also with ``devices=auto``, which is 1 on CPU."""
    for said in gloo(2).run(refusal):
        assert "trainer.devices=1" in said and "runs 2 processes" in said
