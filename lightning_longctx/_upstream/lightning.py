"""Loops, counters, loaders and signals of Lightning."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from subprocess import Popen

    from lightning.fabric.plugins import ClusterEnvironment
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies.launchers.launcher import _Launcher as Launcher


def log_before_step(module: LightningModule, name: str, value: float) -> None:
    """Log a number of an optimizer step from within it, where ``self.log`` knows no hook."""
    hook, module._current_fx_name = module._current_fx_name, "on_before_optimizer_step"
    try:
        module.log(name, value, on_step=True, on_epoch=False, batch_size=1)
    finally:
        module._current_fx_name = hook


def attached_trainer(module: LightningModule) -> Trainer | None:
    """The module's trainer, or none where ``module.trainer`` would raise."""
    return module._trainer


def through_forward(module: LightningModule, method: str, *args: Any) -> Any:
    """Call a method by way of the module's forward, so that hooks on it run: FSDP2 gathers parameters there."""
    from lightning.pytorch.strategies.strategy import _ForwardRedirection

    return _ForwardRedirection()(module, module, method, *args)


def is_first_of_window(trainer: Trainer) -> bool:
    """Whether the current micro-batch starts an accumulation window: Lightning zeroes gradients before its backward."""
    return trainer.fit_loop.epoch_loop.batch_idx % trainer.accumulate_grad_batches == 0


def is_last_of_window(trainer: Trainer) -> bool:
    """Whether an optimizer step follows the current micro-batch."""
    return not trainer.fit_loop._should_accumulate()


def writes_metrics(trainer: Trainer) -> bool:
    """Whether Lightning writes metrics after the current optimizer step: what is logged at others is never seen."""
    return trainer._logger_connector.should_update_logs


def current_dataloader(trainer: Trainer) -> int | None:
    """Index of the loader whose batch is being evaluated; none if there is only one."""
    return None if trainer._results is None else trainer._results.dataloader_idx


def never_in_inference_mode(trainer: Trainer) -> None:
    """Evaluate under ``no_grad``: tensors made in inference mode, as in the sanity check, cannot be trained on later.

    Lightning does so for its own FSDP strategy and for gloo.
    """
    loops = (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop)
    for loop in loops:
        loop.inference_mode = False


def watched_launcher(
    environment: ClusterEnvironment, num_processes: int, num_nodes: int, watch: Callable[[list[Popen]], None]
) -> Launcher:
    """Lightning's launcher of scripts, with ``watch`` over the launched processes in place of its own observer."""
    launchers = import_module("lightning.pytorch.strategies.launchers.subprocess_script")

    class WatchedLauncher(launchers._SubprocessScriptLauncher):
        def launch(self, function: Callable, *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
            self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
            if not self.cluster_environment.creates_processes_externally:
                self._call_children_scripts()
                watch(self.procs)
            launchers._set_num_threads_if_needed(num_processes=self.num_processes)
            return function(*args, **kwargs)

    return WatchedLauncher(environment, num_processes, num_nodes)


def take_signals(trainer: Trainer, terminate: Callable[..., None], requeue: Callable[..., None]) -> None:
    """Set what Lightning will do on SIGTERM and, under SLURM, on the signal to requeue, when it next registers them.

    Its own handlers communicate at once, whatever the other ranks are doing.
    """
    connector = cast("Any", trainer._signal_connector)
    connector._sigterm_notifier_fn, connector._slurm_sigusr_handler_fn = terminate, requeue


def before_each_batch(trainer: Trainer, call: Callable[[], None]) -> None:
    """Call something before a training batch is fetched, where Lightning would broadcast rank 0's SIGTERM."""
    loop = cast("Any", trainer.fit_loop.epoch_loop)
    advance = type(loop).advance

    def advance_after(data_fetcher: Any) -> None:
        call()
        advance(loop, data_fetcher)

    loop.advance, loop._broadcast_sigterm_tensor = advance_after, lambda: None


def hpc_save_path(trainer: Trainer) -> str:
    """Where Lightning looks for the checkpoint of a requeued job: one number above those that are there."""
    return trainer._checkpoint_connector.hpc_save_path(trainer.default_root_dir)


def mark_terminated(trainer: Trainer) -> None:
    """Let ``trainer.received_sigterm`` say so."""
    trainer._signal_connector.received_sigterm = True


def hands_out_samplers(trainer: Trainer, enabled: bool) -> bool:
    """Let Lightning inject its distributed samplers into loaders, or not; returns whether it did so far."""
    connector = trainer._accelerator_connector
    before, connector.use_distributed_sampler = connector.use_distributed_sampler, enabled
    return before


def train_loaders(trainer: Trainer) -> tuple[list[Any], str]:
    """The loaders that training draws from, in order, and how a ``CombinedLoader`` combines them; none before a fit."""
    combined = trainer.fit_loop._combined_loader
    return ([], "") if combined is None else (list(combined.flattened), combined._mode)


def train_counters(trainer: Trainer) -> tuple[Any, Any]:
    """Lightning's progress of epochs and of batches."""
    return trainer.fit_loop.epoch_progress, trainer.fit_loop.epoch_loop.batch_progress


def logged_steps(trainer: Trainer) -> int:
    """Where loggers are on their axis of steps, once the current batch is done."""
    loop = trainer.fit_loop.epoch_loop
    batches: Any = loop.batch_progress.total
    # Inside a batch's last hooks and in the validation after it, the batch has not been counted yet.
    pending = trainer.training and batches.completed == batches.processed - 1
    pending |= trainer.validating and not trainer.sanity_checking
    return loop._batches_that_stepped + (pending and not loop._should_accumulate())


def validation_is_due(trainer: Trainer) -> bool:
    """Whether Lightning will validate after the batch whose last hooks it is in."""
    fit_loop, batches = trainer.fit_loop, cast("Any", trainer.fit_loop.epoch_loop.batch_progress.current)
    in_last_hooks = trainer.training and batches.ready == batches.processed == batches.completed + 1
    return in_last_hooks and fit_loop.epoch_loop._should_check_val_fx(cast("Any", fit_loop._data_fetcher))


def plateaus_are_due(trainer: Trainer) -> bool:
    """Whether ``ReduceLROnPlateau`` will take its step of the epoch, whose last hooks Lightning is in."""
    fit_loop, epochs = trainer.fit_loop, cast("Any", trainer.fit_loop.epoch_progress.current)
    in_last_hooks = trainer.training and epochs.started == epochs.processed == epochs.completed + 1
    return in_last_hooks and fit_loop.epoch_loop._num_ready_batches_reached() and not fit_loop.restarting


def plateau_monitors(trainer: Trainer) -> list[str]:
    """Metrics by which ``ReduceLROnPlateau`` takes a step per epoch."""
    configs = trainer.lr_scheduler_configs
    return [str(config.monitor) for config in configs if config.reduce_on_plateau and config.interval == "epoch"]


def step_plateaus(trainer: Trainer) -> None:
    """Let ``ReduceLROnPlateau`` take the step of the epoch before the current one."""
    epochs = trainer.fit_loop.epoch_progress.current
    epochs.completed -= 1  # as it was then; the scheduler's frequency goes by it
    try:
        trainer.fit_loop.epoch_loop._update_learning_rates(interval="epoch", update_plateau_schedulers=True)
    finally:
        epochs.completed += 1


def skip_plateaus(trainer: Trainer) -> None:
    """Let the epoch that goes on end without a step of ``ReduceLROnPlateau``, as Lightning does after a resume."""
    trainer.fit_loop._restarting = True


def epoch_means(trainer: Trainer) -> list[str]:
    """Names of metrics that become means over the training batches of the epoch when it ends."""
    metas = [result.meta for result in trainer.fit_loop.epoch_loop._results.values() if result.meta.on_epoch]
    return sorted({name for meta in metas for name in (meta.name, f"{meta.name}_epoch")})


def set_callback_metrics(trainer: Trainer, metrics: dict[str, Any]) -> None:
    """Let ``trainer.callback_metrics`` have these until something else is logged."""
    trainer._logger_connector._callback_metrics.update(metrics)


def continue_epoch(trainer: Trainer, batch: int, num_before: int, logged: int, validates: bool) -> None:
    """Let the epoch that begins go on after ``batch`` batches, with data that are fetched from now on.

    Args:
        trainer: In ``on_train_start``, after its counters were loaded.
        batch: Batches of the epoch that are done; 0 begins the epoch as a new one.
        num_before: Batches of earlier epochs.
        logged: As of ``logged_steps``.
        validates: Whether the validation after the last of these batches, if there is one, is left to do.
    """
    fit_loop, loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
    # Lightning would leave out this epoch's step of ReduceLROnPlateau.
    fit_loop._restarting = False
    if batch == 0:
        loop.restarting = False
    progress: Any = loop.batch_progress
    for tracker, count in ((progress.current, batch), (progress.total, num_before + batch)):
        tracker.ready = tracker.started = tracker.processed = tracker.completed = count
    fetcher = fit_loop._data_fetcher
    iter(cast("Any", fetcher))
    loop._batches_that_stepped = logged
    if not loop.restarting or not loop._should_check_val_fx(cast("Any", fetcher)):
        return
    # Lightning counts the batch once more when it goes round its loop to find that validation is done.
    loop._batches_that_stepped -= not loop._should_accumulate()
    if validates:
        # Lightning returns to a validation that was interrupted; this one begins.
        stages = import_module("lightning.pytorch.loops.evaluation_loop").RestartStage
        loop.val_loop._restart_stage, loop.val_loop.restarting = stages.RESTARTED_MID_EVALUATION, False
