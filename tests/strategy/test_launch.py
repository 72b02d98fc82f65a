"""Wrong numbers of processes are refused before anything communicates."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from lightning.fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment

from lightning_longctx.strategy.launch import check_launch

ROOT = Path(__file__).parents[2]

PROGRAM = """
import sys
from lightning.pytorch import Trainer
from lightning_longctx.strategy import LongContextStrategy
from lightning_longctx.topology import Degrees
Trainer(strategy=LongContextStrategy(Degrees(context=2)), accelerator="cpu", devices=eval(sys.argv[1]), logger=False)
"""


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


def test_torchrun_fails_on_every_rank(tmp_path: Path) -> None:
    """Also with ``devices=auto``, which is 1 on CPU."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    logs = tmp_path / "logs"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    command += ["--log-dir", str(logs), "--redirects", "3", str(program), "'auto'"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
    assert done.returncode != 0
    errors = [path.read_text() for path in sorted(logs.glob("**/stderr.log"))]
    assert len(errors) == 2
    assert any("trainer.devices=" in error and "2 processes" in error for error in errors), errors
