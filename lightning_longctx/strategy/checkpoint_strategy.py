"""What a run saves and restores: the part of the strategy that knows checkpoints."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer

from lightning_longctx.batch import Sharding
from lightning_longctx.plan.communication import Communication
from lightning_longctx.strategy.checkpoints.position import KEY, RandomNumbers, position, position_in, random_numbers
from lightning_longctx.strategy.checkpoints.restoring import Restoring
from lightning_longctx.strategy.checkpoints.save_options import (
    check_callbacks,
    check_kept,
    check_target,
    why_kept,
)
from lightning_longctx.strategy.checkpoints.saving import Saves
from lightning_longctx.strategy.checkpoints.tensors import flat_optimizer_state, parameter_names, whole_optimizer_state
from lightning_longctx.strategy.failure.signals import StopRequests
from lightning_longctx.strategy.mesh_strategy import MeshStrategy
from lightning_longctx.topology import Degrees


class CheckpointStrategy(MeshStrategy):
    """Writes and reads checkpoints, whole or not at all.

    Args:
        degrees: As in ``MeshStrategy``,
        batch_sharding: as there,
        communication: as there.
        save_distributed_checkpoint: As in ``LongContextStrategy``,
        async_checkpoint: as there.
        process_group_backend: As in ``MeshStrategy``,
        timeout: as there.
    """

    def __init__(
        self,
        degrees: Degrees,
        batch_sharding: Sharding,
        communication: Communication,
        save_distributed_checkpoint: bool,
        async_checkpoint: bool,
        process_group_backend: str | None,
        timeout: timedelta,
    ) -> None:
        super().__init__(
            degrees, batch_sharding, communication, save_distributed_checkpoint, process_group_backend, timeout
        )
        self._saves = Saves(async_checkpoint, timeout)
        self._stop_requests = StopRequests(self._saves.finish)
        self._begin_run()

    def _begin_run(self) -> None:
        self._restoring, self._random_numbers, self._is_set_up = Restoring(), RandomNumbers(), False

    def connect(self, model: LightningModule) -> None:
        """A run of the Trainer begins."""
        super().connect(model)
        self._begin_run()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """State for a checkpoint."""
        state_of = flat_optimizer_state if self._save_distributed_checkpoint else whole_optimizer_state
        return state_of(self._module, getattr(optimizer, "optimizer", optimizer))

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a directory that every rank contributes to, or one file; it appears when it is whole.

        Raises:
            ValueError: There is something that no checkpoint may take the place of. Raised on every rank.
        """
        check_target(filepath, storage_options)
        path = Path(filepath)
        path, kept = self.broadcast((path, why_kept(path) if self.is_global_zero else None))
        check_kept(path, kept)
        names = [parameter_names(self._module, optimizer) for optimizer in self.optimizers]
        checkpoint[KEY] = position(self._trainer, self.degrees, self._seed, self.stream, names, self.root_device)
        self._add_to_checkpoint(checkpoint[KEY], path)
        self._saves.save(checkpoint, path, self._save_distributed_checkpoint)

    def _add_to_checkpoint(self, entry: dict[str, Any], path: Path) -> None:
        """What else goes into the strategy's entry of a checkpoint, or beside it."""

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove an older checkpoint; while a newer one is being written, once that is whole."""
        if self.is_global_zero:
            self._saves.remove(Path(filepath))

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """No: Lightning then forgets ``weights_only``. ``setup`` fills in the tensors (``checkpoints.restoring``)."""
        return False

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read what any degrees have written, or one file of any strategy."""
        self._saves.finish()
        rest = self._restoring.read(checkpoint_path, weights_only)
        if self._is_set_up:
            self._restore()
        return rest

    def _before_setup(self, trainer: Trainer) -> None:
        self._restoring.agree()
        check_callbacks(trainer, self._saves, self.checkpoint_io)

    def _after_setup(self) -> None:
        self._restore()
        self._is_set_up = True

    def _restore(self) -> None:
        fitting, strict = self._trainer.state.fn == TrainerFn.FITTING, self._module.strict_loading
        rest = self._restoring.take(self._module, self.optimizers if fitting else [], strict=strict)
        if fitting and rest is not None and (saved := position_in(rest)) is not None:
            self._seed = saved["seed"]
            self._random_numbers = random_numbers(saved, self.degrees, self.global_rank)
            self.stream.load(saved["stream"], rest.get("loops"))

    def on_train_start(self) -> None:
        """See ``MeshStrategy``, which begins with the samples; random numbers go on where they were."""
        self._random_numbers.before_samples(self.root_device)
        super().on_train_start()
        self._random_numbers.before_training(self.root_device)

    def on_train_end(self) -> None:
        """Wait for a checkpoint that is still being written."""
        super().on_train_end()
        self._saves.finish()

    def on_exception(self, exception: BaseException) -> None:
        """Give a checkpoint in the background the time to become whole, then see ``MeshStrategy``."""
        self._saves.leave(exception)
        super().on_exception(exception)

    def teardown(self) -> None:
        """Wait for a checkpoint that is still being written; then nothing of the run is left."""
        self._saves.close()
        self._is_set_up = False
        super().teardown()
