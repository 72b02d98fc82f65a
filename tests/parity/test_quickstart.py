"""The shipped quickstart at its full size: 4 processes as two inner rings of 2 against one."""

from __future__ import annotations

import pytest
from lightning.pytorch.utilities import rank_zero_only

from lightning_longctx.strategy.gradients.norms import whole
from lightning_longctx.testing.tolerances import relative_error
from tests.parity.runs import Recorder, Result

OPTIONS = [
    "fit",
    "--config=quickstart.yaml",
    "--trainer.max_steps=5",
    "--trainer.limit_val_batches=0",
    "--trainer.logger=false",
    "--trainer.callbacks=null",
    "--trainer.enable_checkpointing=false",
    "--trainer.enable_progress_bar=false",
]


def fit_recipe(*more: str) -> Result | None:
    """What the command line does, with a recorder beside it."""
    from lightning_longctx.cli.train import LongContextCLI

    recorder = Recorder()

    class Recorded(LongContextCLI):
        def after_instantiate_classes(self) -> None:
            self.trainer.callbacks.append(recorder)

    command = Recorded([*OPTIONS, *more])
    weights = {name: whole(weight.detach()).clone() for name, weight in command.model.named_parameters()}
    return Result(recorder.losses, recorder.norms, weights) if rank_zero_only.rank == 0 else None


@pytest.mark.slow
def test_full_size_quickstart_equals_one_process(gloo, tmp_path):
    folder = f"--trainer.default_root_dir={tmp_path}"
    (alone,) = gloo(1).run(fit_recipe, folder, "--config=one_process.yaml", timeout=280)
    spread = gloo(4).run(fit_recipe, folder, timeout=280)[0]
    assert len(alone.losses) == 5
    assert spread.losses == pytest.approx(alone.losses, rel=1e-5)
    assert spread.norms == pytest.approx(alone.norms, rel=1e-5)
    for name, weight in alone.weights.items():
        assert relative_error(spread.weights[name], weight) < 1e-5, name
