"""``LongContextStrategy``: where Lightning asks, and who answers. A table of contents; the answers are next door."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_longctx import _upstream
from lightning_longctx.attention.backends import BackendName
from lightning_longctx.batch import LayoutOption
from lightning_longctx.memory.policy import Checkpointing
from lightning_longctx.models.hugging_face.rotary import exact_frequencies
from lightning_longctx.plan.communication import Communication
from lightning_longctx.strategy.checkpoint_strategy import CheckpointStrategy
from lightning_longctx.strategy.contents import BatchContents, read_batch
from lightning_longctx.strategy.gradients.frozen import keeping_frozen_gradients
from lightning_longctx.strategy.gradients.metrics import release_metrics, share_metrics
from lightning_longctx.strategy.gradients.nonfinite import GradientGuard, NonFiniteGradients
from lightning_longctx.strategy.options import sharding_of_options
from lightning_longctx.strategy.parameters.sharding import copy_from_first_rank, distribute, materialise, reshard
from lightning_longctx.strategy.parameters.sharding_options import (
    ShardingName,
    ShardingOptions,
    check_sharding,
    resolve_sharding,
)
from lightning_longctx.strategy.parameters.tensor_parallel import (
    check_overlap,
    overlap,
    tensor_parallelise,
    tensor_plan,
)
from lightning_longctx.strategy.randomness import step_draws, step_randomness
from lightning_longctx.strategy.step_memory import StepMemory
from lightning_longctx.strategy.steps import compare_batches, recomputed_attention, whole_attention
from lightning_longctx.strategy.validate import check_module, check_optimizers, is_parallelised, remember
from lightning_longctx.topology import Degrees


class LongContextStrategy(CheckpointStrategy):
    """Trains any LightningModule on sequences that are spread over processes, with the numbers of a single one.

    Batches are cut in the loader, attention (``F.scaled_dot_product_attention(..., is_causal=True)`` or
    ``lightning_longctx.attend``) reaches over all processes of a sequence, and every token counts once. A module reads
    ``input_ids``, ``position_ids`` and ``shift_labels`` of its batch, and returns the mean loss over its
    ``shift_labels`` as ever. Nothing happens at construction.

    In ``training_step`` torch's random numbers differ between processes that hold different tokens, Python's and
    NumPy's are the same on all: decide with those what all must do alike.

    Args:
        degrees: How many processes share data, context, heads and matrices.
        layout: Which tokens of a sequence a process holds. ``zigzag`` and ``striped`` give all the same work under a
            causal mask, ``contiguous`` does not; ``document_zigzag`` does however documents are packed, ``balanced``
            keeps documents whole where it can, so that less is sent. ``auto`` counts for every batch which is best.
        communication: How keys and values travel between processes: schedule, dtype, what is kept, speeds of links.
        backend: What computes attention, see ``lightning-longctx explain``; ``auto`` chooses by device, dtype and mask.
        sharding: ``replicate`` keeps all parameters on every process. ``fsdp`` spreads them over data x context x head.
            ``hsdp`` spreads them over some neighbours of these, such as one node, and replicates that.
        sharding_options: What goes with ``fsdp`` and ``hsdp``.
        nonfinite_gradients: What happens where a loss or a gradient is not finite, on whatever process: all ``raise``
            the same error before the optimizer steps, or all ``skip`` the step. A skipped step leaves weights and
            moments as they are, counts as a step for schedules, and in ``skipped_steps`` of the log.
        async_tensor_parallel: Let tensor ranks communicate while they multiply: PyTorch does so within compiled layers
            on CUDA ("async tensor parallelism").
        checkpointing: What backward keeps of the model's blocks, and what it computes again; what runs in tiles.
        sequence_dims: The dim along which a batch entry is cut, by entry, where its shape leaves that open; ``null``
            gives the entry whole to every process.
        pad_values: What a batch entry is padded with, by entry, if not with 0.
        save_distributed_checkpoint: Every process writes its part into a directory, which any other degrees can read.
            False gathers all into one file.
        async_checkpoint: Train on while a checkpoint is written. What is saved is first copied to CPU memory, so that
            needs room once more. The next save and the end of the run wait for it.
        process_group_backend: Such as ``gloo`` or ``nccl``; ``null`` chooses by device.
        timeout: How long a process waits for another one.

    Raises:
        ValueError: An option is wrong; when the Trainer is made: the degrees do not fit its processes.
    """

    def __init__(
        self,
        degrees: Degrees = Degrees(),  # noqa: B008  frozen
        layout: LayoutOption = "auto",
        communication: Communication = Communication(),  # noqa: B008  frozen
        backend: BackendName = "auto",
        sharding: ShardingName = "replicate",
        sharding_options: ShardingOptions = ShardingOptions(),  # noqa: B008  frozen
        nonfinite_gradients: NonFiniteGradients = "raise",
        async_tensor_parallel: bool = False,
        checkpointing: Checkpointing = Checkpointing(),  # noqa: B008  frozen
        sequence_dims: dict[str, int | None] | None = None,
        pad_values: dict[str, int] | None = None,
        save_distributed_checkpoint: bool = True,
        async_checkpoint: bool = False,
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=30),  # noqa: B008  immutable
    ) -> None:
        check_sharding(sharding, sharding_options)
        super().__init__(
            degrees,
            sharding_of_options(layout, backend, communication, sequence_dims, pad_values),
            communication,
            save_distributed_checkpoint,
            async_checkpoint,
            process_group_backend,
            timeout,
        )
        check_overlap(async_tensor_parallel, degrees.tensor)
        self._async_tensor_parallel = async_tensor_parallel
        self.memory = StepMemory(checkpointing)
        self._parameter_sharding: ShardingName = sharding
        self._sharding_options = sharding_options
        self._gradient_guard = GradientGuard(nonfinite_gradients)
        self._shared_metrics: list[Metric] = []
        self._contents = BatchContents()

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        options, device = self._sharding_options, self.root_device.type
        self._distribution = resolve_sharding(
            self._parameter_sharding, options, self.degrees, self.num_processes, device
        )
        self.memory.check(self.root_device)
        self._shard_ranks = self._distribution.shard_ranks if self._parameter_sharding == "hsdp" else None

    def setup(self, trainer: Trainer) -> None:
        """Distribute parameters, make the optimizers, and restore both."""
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        self._before_setup(trainer)
        if not is_parallelised(self._module, self._distribution):
            self.distribute_parameters(self._module)
        getattr(self._module, "forget_step", lambda: None)()
        self.memory.begin(trainer, self._module, self.root_device, self.degrees.tensor)
        if self.degrees.tensor > 1:
            self._shared_metrics = share_metrics(self._module, self.mesh.loss_group)
        reshard(self._module)
        _upstream.discard_unsynced_gradients(self._module)
        self._weights.reset()
        self._gradient_guard.forget()
        self._gradient_guard.num_tensor_ranks = self.degrees.tensor
        self._gradient_guard.take_clipping(self.precision_plugin)
        self.barrier()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if trainer.state.fn == TrainerFn.FITTING and not self._sharding_options.cpu_offload:
            _upstream.optimizers_to_device(self.optimizers, self.root_device)
        self._after_setup()

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Make optimizers, which must hold the distributed parameters."""
        super().setup_optimizers(trainer)
        check_optimizers(self.optimizers, self._module)

    def distribute_parameters(self, module: nn.Module) -> None:
        """Cut a module over tensor ranks, then shard or replicate it over the others, in place. A collective.

        The Trainer's module is distributed in ``setup``; call it for another one that is to be like it.
        """
        check_module(module, self.degrees)
        plan = tensor_plan(module, self.degrees.tensor)
        if self._async_tensor_parallel:
            overlap(module, self.root_device)
        materialise(module, self.root_device)
        exact_frequencies(self.precision_plugin.convert_module)(module).to(self.root_device)
        copy_from_first_rank(module)
        tensor_parallelise(module, self.mesh.device_mesh["tensor"], plan)
        self.memory.apply(module, self.root_device, self.degrees.tensor)
        distribute(module, self.mesh.parameters, self._parameter_sharding, self._sharding_options)
        _upstream.reduce_unused_parameters(module, self._gradient_guard.unused)
        remember(module, self._distribution)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's step with attention over the whole sequence."""
        self.memory.before_micro_batch()
        self._contents = read_batch(args)
        self._weights.begin(self._contents)
        with self.precision_plugin.train_step_context(), self._randomness():
            output = self._run("training_step", self._contents, args, kwargs)
        if output is None and self._module.automatic_optimization and self._trainer.accumulate_grad_batches > 1:
            raise ValueError(
                "training_step returned None within an accumulation window, of which the gradients would be lost. "
                "Return the loss times 0, or set accumulate_grad_batches=1."
            )
        return output

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("validation_step", self.precision_plugin.val_step_context(), args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("test_step", self.precision_plugin.test_step_context(), args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("predict_step", self.precision_plugin.predict_step_context(), args, kwargs)

    def _evaluate(self, step: str, precision: AbstractContextManager, args: tuple, kwargs: dict[str, Any]) -> Any:
        self._stop_requests.before_evaluation_batch(self._trainer)
        with precision:
            output = self._run(step, read_batch(args), args, kwargs)
        reshard(self._module)
        return output

    def _run(self, step: str, contents: BatchContents, args: tuple, kwargs: dict[str, Any]) -> Any:
        compare_batches(contents, self.mesh, self.root_device)
        # By way of the root's forward: parameters are gathered there, and Lightning calls steps.
        with whole_attention(contents, self.degrees, step, self._module):
            return self._forward_redirection(self._module, self._module, step, *args, **kwargs)

    def _randomness(self) -> AbstractContextManager:
        step = self._trainer.fit_loop.epoch_loop.total_batch_idx
        self._draws = step_draws(self._seed, step, self.degrees, self.global_rank)
        return step_randomness(self._draws, self._seed, self.mesh.loss_rank, step, self.root_device)

    def record_loss_count(self, count: Tensor | int) -> None:
        """Declare over how many of this rank's tokens the loss of the current training step is a mean.

        Needed only where it is not the number of valid ``shift_labels`` of the batch; all ranks must then do it.
        """
        self._weights.record(count)

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Differentiate the loss with the weight of its tokens (see ``strategy.gradients.token_weights``)."""
        if not self._module.automatic_optimization:
            loss = self._weights.scaled_alone(closure_loss, self._module)
            self._gradient_guard.watch(loss, first=False)
            with keeping_frozen_gradients(self._module):
                return super().backward(loss, optimizer, *args, **kwargs)
        self.memory.before_backward()
        first = _upstream.is_first_of_window(self._trainer)
        num_micro_batches = self._trainer.accumulate_grad_batches
        loss = self._weights.scaled(closure_loss, self._module, first=first, num_micro_batches=num_micro_batches)
        self._gradient_guard.watch(loss, first=first)
        with recomputed_attention(self._contents, self._draws, self._module):
            return super().backward(loss, optimizer, *args, **kwargs)

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Step; gradients are complete before callbacks see them and clipping measures them."""

        def complete() -> Any:
            result = closure()
            self._weights.finish_window(self._module)
            skipped_before = self.num_skipped_steps
            self._gradient_guard.check(optimizer, self._module, self._trainer.global_step)
            self.memory.after_gradients(skipped=self.num_skipped_steps > skipped_before)
            return result

        try:
            return super().optimizer_step(optimizer, complete, model, **kwargs)
        finally:
            self._gradient_guard.release()

    def gradient_norm(self, optimizer: Optimizer) -> float:
        """2-norm of all gradients of an optimizer over all ranks, as they are now; every rank must ask.

        In ``on_before_optimizer_step`` it is known already, and costs nothing.
        """
        return self._gradient_guard.norm(optimizer)

    @property
    def num_skipped_steps(self) -> int:
        """How many optimizer steps ``nonfinite_gradients=skip`` has left out."""
        return self._gradient_guard.num_skipped

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Micro-batches before the last of a window keep their gradients to themselves."""
        with _upstream.no_gradient_sync(self._module, enabled=True):
            yield

    def _add_to_checkpoint(self, entry: dict[str, Any], path: Path) -> None:
        self.memory.save(entry, path, self.is_global_zero)

    def teardown(self) -> None:
        """Leave metrics as they were; then see ``CheckpointStrategy``."""
        release_metrics(self._shared_metrics)
        try:
            self.memory.leave(self.lightning_module)
            if self.lightning_module is not None:
                reshard(self.lightning_module)  # an error may have left it gathered
        finally:
            super().teardown()
