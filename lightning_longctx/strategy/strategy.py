"""``LongContextStrategy``: where Lightning asks, and who answers. A table of contents; the answers are next door."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_longctx import _upstream
from lightning_longctx.attention import open_ring
from lightning_longctx.attention.backends import BackendName
from lightning_longctx.batch import LayoutOption, ensure_sharded
from lightning_longctx.models.hugging_face.rotary import exact_frequencies
from lightning_longctx.plan.communication import Communication
from lightning_longctx.strategy.checkpoint import flat_optimizer_state, load_sharded, save_sharded
from lightning_longctx.strategy.contents import BatchContents, let_records_pass, read_batch
from lightning_longctx.strategy.failure import end_processes, explain
from lightning_longctx.strategy.gradients import UNWEIGHTED_MEAN, TokenWeights
from lightning_longctx.strategy.launch import check_launch
from lightning_longctx.strategy.loaders import DataRanks, gather_over, shard_loader
from lightning_longctx.strategy.options import check_heads, check_options, declared_masks, sharding_of_options
from lightning_longctx.strategy.places import sampler_place, sampler_seed, sharding_of_rank
from lightning_longctx.strategy.randomness import share_rng, step_draws, step_randomness
from lightning_longctx.strategy.sharding import ShardingName, copy_from_first_rank, distribute, materialise, reshard
from lightning_longctx.strategy.steps import compare_batches, recomputed_attention, whole_attention
from lightning_longctx.strategy.validate import check_module, check_optimizers, is_parallelised
from lightning_longctx.topology import Degrees
from lightning_longctx.topology.mesh import ParallelMesh, build_mesh


class LongContextStrategy(ModelParallelStrategy):
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
        sequence_dims: The dim along which a batch entry is cut, by entry, where its shape leaves that open; ``null``
            gives the entry whole to every process.
        pad_values: What a batch entry is padded with, by entry, if not with 0.
        save_distributed_checkpoint: Every process writes its part into a directory, which any other degrees can read.
            False gathers all into one file.
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
        sequence_dims: dict[str, int | None] | None = None,
        pad_values: dict[str, int] | None = None,
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=30),  # noqa: B008  immutable
    ) -> None:
        super().__init__(
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        check_options(degrees, sharding)
        self.batch_sharding = sharding_of_options(layout, backend, communication, sequence_dims, pad_values)
        self.degrees = self._wanted_degrees = degrees
        self._communication = communication
        self._parameter_sharding: ShardingName = sharding
        self._process_timeout = timeout
        self._mesh: ParallelMesh | None = None
        self._seed = self._sampler_seed = 0
        self._contents = BatchContents()
        self._warned_of_mean = False

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if self._layer_sync is not None:
            raise ValueError("sync_batchnorm=True is not supported: use a norm over features, such as RMSNorm.")
        check_launch(self.cluster_environment, self.num_processes, self.num_nodes)
        self.degrees = self._wanted_degrees.resolve(self.num_processes * self.num_nodes)
        super()._configure_launcher()

    def setup_environment(self) -> None:
        """Connect the processes; the mesh and the ring are made once and then kept."""
        check_heads(self._module, self.degrees)
        self._setup_distributed()
        self._seed, self._sampler_seed = share_rng(self.broadcast), self.broadcast(sampler_seed())
        if self._mesh is None or self._mesh.degrees != self.degrees:
            self._mesh = build_mesh(self.degrees, self.root_device.type)
            self._device_mesh = self._mesh.device_mesh
            self._weights = TokenWeights(self._mesh, self.root_device)
            ring = open_ring(self.degrees, self.global_rank, self._process_timeout, self._communication)
            self.batch_sharding = sharding_of_rank(self.batch_sharding, self.degrees, self.global_rank, ring)
        self.batch_sharding = replace(self.batch_sharding, masks=declared_masks(self._module))
        let_records_pass(self.precision_plugin)
        self._module._device_mesh = self._device_mesh
        _upstream.never_in_inference_mode(self._trainer)

    def on_exception(self, exception: BaseException) -> None:
        """Say on which rank it was, and end the processes that this one has launched."""
        explain(exception, self.global_rank, self.world_size)
        if isinstance(self.launcher, _upstream.SubprocessScriptLauncher):
            end_processes(self.launcher.procs)

    @property
    def mesh(self) -> ParallelMesh:
        """The run's process groups; there once the Trainer has connected the processes."""
        if self._mesh is None:
            raise RuntimeError("the mesh does not exist yet: the Trainer makes it when fit, validate, ... begins.")
        return self._mesh

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return sampler_place(self.degrees, self.global_rank, self._sampler_seed)

    def process_dataloader(self, dataloader: object) -> object:
        """Let a loader cut its batches, and end on all ranks together."""
        place = self.distributed_sampler_kwargs
        gather = gather_over(self.mesh.data_group, self.root_device)
        ranks = DataRanks(place["rank"], place["num_replicas"], gather, self._seed)
        return shard_loader(dataloader, self.batch_sharding, ranks, training=self._trainer.training)

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Cut what comes from no DataLoader, then move it."""
        return super().batch_to_device(ensure_sharded(batch, self.batch_sharding), device, dataloader_idx)

    def setup(self, trainer: Trainer) -> None:
        """Distribute parameters, then make the optimizers."""
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        if not is_parallelised(self._module, self.mesh.loss):
            self._distribute_parameters()
        reshard(self._module)
        _upstream.discard_unsynced_gradients(self._module)
        self._weights.reset()
        self.barrier()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if trainer.state.fn == TrainerFn.FITTING:
            _upstream.optimizers_to_device(self.optimizers, self.root_device)

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Make optimizers, which must hold the distributed parameters."""
        super().setup_optimizers(trainer)
        check_optimizers(self.optimizers, self._module)

    def _distribute_parameters(self) -> None:
        check_module(self._module, self.degrees)
        materialise(self._module, self.root_device)
        self.model = exact_frequencies(self.precision_plugin.convert_module)(self._module)
        self.model_to_device()
        copy_from_first_rank(self._module)
        distribute(self._module, self.mesh.loss, self._parameter_sharding)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's step with attention over the whole sequence."""
        self._contents = read_batch(args)
        self._weights.begin(self._contents)
        with self.precision_plugin.train_step_context(), self._randomness():
            return self._run("training_step", self._contents, args, kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("validation_step", self.precision_plugin.val_step_context(), args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("test_step", self.precision_plugin.test_step_context(), args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("predict_step", self.precision_plugin.predict_step_context(), args, kwargs)

    def _evaluate(self, step: str, precision: AbstractContextManager, args: tuple, kwargs: dict[str, Any]) -> Any:
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
        step, place = self._trainer.fit_loop.epoch_loop.total_batch_idx, (self.mesh.loss_rank, self.mesh.num_loss_ranks)
        self._draws = step_draws(self._seed, step, self.degrees, self.global_rank)
        return step_randomness(self._draws, self._seed, place, step, self.root_device)

    def record_loss_count(self, count: Tensor | int) -> None:
        """Declare over how many of this rank's tokens the loss of the current training step is a mean.

        Needed only where it is not the number of valid ``shift_labels`` of the batch; all ranks must then do it.
        """
        self._weights.record(count)

    def sum_over_tokens(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks that hold different tokens; a new tensor, the same on all of them."""
        total = tensor.detach().clone()
        dist.all_reduce(total, group=self.mesh.loss_group)
        return total

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Differentiate the loss with the weight of its tokens (see ``strategy.gradients``)."""
        if not self._module.automatic_optimization:
            loss = self._weights.scaled_alone(closure_loss, self._module)
            return super().backward(loss, optimizer, *args, **kwargs)
        first = _upstream.is_first_of_window(self._trainer)
        num_micro_batches = self._trainer.accumulate_grad_batches
        loss = self._weights.scaled(closure_loss, self._module, first=first, num_micro_batches=num_micro_batches)
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
            return result

        return super().optimizer_step(optimizer, complete, model, **kwargs)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Micro-batches before the last of a window keep their gradients to themselves."""
        with _upstream.no_gradient_sync(self._module, enabled=True):
            yield

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over all processes; a mean does not weigh them by tokens, and says so once."""
        if isinstance(tensor, Tensor) and reduce_op in ("mean", "avg"):
            if self.mesh.num_loss_ranks > 1 and not self._warned_of_mean:
                self._warned_of_mean = True
                rank_zero_warn(UNWEIGHTED_MEAN)
            # Lightning averages its batch sizes too; integers would be rounded down.
            tensor = tensor if tensor.is_floating_point() else tensor.double()
        return super().reduce(tensor, group, reduce_op)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """State for a checkpoint."""
        if not self._save_distributed_checkpoint:
            return super().optimizer_state(optimizer)
        return flat_optimizer_state(self._module, getattr(optimizer, "optimizer", optimizer))

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a directory that every rank contributes to, or one file."""
        if not self._save_distributed_checkpoint or storage_options is not None:
            return super().save_checkpoint(checkpoint, filepath, storage_options)
        save_sharded(checkpoint, Path(self.broadcast(filepath)), self.is_global_zero, self.barrier)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read what any degrees have written, or one file of any strategy."""
        path = Path(self.broadcast(checkpoint_path))
        if not _upstream.is_sharded_checkpoint(path):
            return super().load_checkpoint(path, weights_only)
        optimizers = self.optimizers if self._trainer.state.fn == TrainerFn.FITTING else []
        strict = self._module.strict_loading
        return load_sharded(path, self._module, optimizers, strict=strict, weights_only=weights_only)

    @property
    def _module(self) -> LightningModule:
        return cast("LightningModule", self.lightning_module)

    @property
    def _trainer(self) -> Trainer:
        return self._module.trainer
