"""Processes, their mesh and their data: the half of the strategy that knows no parameters."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_longctx import _upstream
from lightning_longctx.attention import open_ring
from lightning_longctx.batch import Sharding, ensure_sharded
from lightning_longctx.memory.allocator import prepare_allocator
from lightning_longctx.plan.communication import Communication
from lightning_longctx.strategy.contents import let_records_pass
from lightning_longctx.strategy.failure.handling import Failure
from lightning_longctx.strategy.failure.signals import StopRequests
from lightning_longctx.strategy.failure.watch import watched
from lightning_longctx.strategy.gradients.token_weights import UNWEIGHTED_MEAN, TokenWeights
from lightning_longctx.strategy.launch import check_launch
from lightning_longctx.strategy.options import check_heads, declared_masks
from lightning_longctx.strategy.places import sampler_place, sampler_seed, sharding_of_rank
from lightning_longctx.strategy.randomness import share_rng
from lightning_longctx.strategy.samples.agreement import DataRanks, gather_over, gather_values_over
from lightning_longctx.strategy.samples.stream import Stream
from lightning_longctx.topology import Degrees
from lightning_longctx.topology.mesh import ParallelMesh, build_mesh


class MeshStrategy(ModelParallelStrategy):
    """Launches and connects the processes of a run, and gives each its part of the data.

    ``CheckpointStrategy`` adds checkpoints, and ``LongContextStrategy`` parameters: sharding, steps and gradients.

    Args:
        degrees: Wanted degrees.
        batch_sharding: How batches are cut, as far as the options say.
        communication: How keys and values travel.
        save_distributed_checkpoint: As in ``ModelParallelStrategy``.
        process_group_backend: As there.
        timeout: As there.
    """

    def __init__(
        self,
        degrees: Degrees,
        batch_sharding: Sharding,
        communication: Communication,
        save_distributed_checkpoint: bool,
        process_group_backend: str | None,
        timeout: timedelta,
    ) -> None:
        super().__init__(
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        self.degrees = self._wanted_degrees = degrees
        self.batch_sharding = batch_sharding
        self._communication = communication
        self._process_timeout = timeout
        self._mesh: ParallelMesh | None = None
        self._shard_ranks: int | None = None  # one axis of parameters
        self._seed = self._sampler_seed = 0
        self._warned_of_mean = False
        self._failure, self._stop_requests = Failure(), StopRequests()
        self.stream = Stream()

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if self._layer_sync is not None:
            raise ValueError("sync_batchnorm=True is not supported: use a norm over features, such as RMSNorm.")
        check_launch(self.cluster_environment, self.num_processes, self.num_nodes)
        prepare_allocator(self.root_device.type)
        self.degrees = self._wanted_degrees.resolve(self.num_processes * self.num_nodes)
        self._launcher = watched(self.cluster_environment, self.num_processes, self.num_nodes)

    def setup_environment(self) -> None:
        """Connect the processes; the mesh and the ring are made once and then kept."""
        check_heads(self._module, self.degrees)
        self._setup_distributed()
        self._failure.meet()
        self._seed, self._sampler_seed = share_rng(self.broadcast), self.broadcast(sampler_seed())
        if self._mesh is None or self._mesh.degrees != self.degrees:
            self._mesh = build_mesh(self.degrees, self.root_device.type, self._shard_ranks)
            self._device_mesh = self._mesh.device_mesh
            self._weights = TokenWeights(self._mesh, self.root_device)
            ring = open_ring(self.degrees, self.global_rank, self._process_timeout, self._communication)
            self.batch_sharding = sharding_of_rank(self.batch_sharding, self.degrees, self.global_rank, ring)
        self.batch_sharding = replace(self.batch_sharding, masks=declared_masks(self._module))
        let_records_pass(self.precision_plugin)
        self._module._device_mesh = self._device_mesh
        _upstream.never_in_inference_mode(self._trainer)
        self.stream.connect(self._trainer, self._data_ranks())
        _upstream.bound_waits(self._process_timeout)
        self._stop_requests.connect(self._trainer, self.root_device)

    def on_exception(self, exception: BaseException) -> None:
        """Say on which rank it was and why, and end the processes that this one has launched."""
        self._failure.handle(exception, self.launcher)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The first thing a checkpoint asks for: one on an error is written by all ranks, or not at all."""
        self._failure.check_save(self._trainer, self.launcher)
        return super().lightning_module_state_dict()

    @property
    def mesh(self) -> ParallelMesh:
        """The run's process groups; there once the Trainer has connected the processes."""
        if self._mesh is None:
            raise RuntimeError("the mesh does not exist yet: the Trainer makes it when fit, validate, ... begins.")
        return self._mesh

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return sampler_place(self.degrees, self.global_rank, self._sampler_seed)

    def _data_ranks(self) -> DataRanks:
        place, group = self.distributed_sampler_kwargs, self.mesh.data_group
        gathers = gather_over(group, self.root_device), gather_values_over(group)
        return DataRanks(place["rank"], place["num_replicas"], gathers[0], self._seed, place["seed"], gathers[1])

    def process_dataloader(self, dataloader: object) -> object:
        """Let a loader give every data rank its samples, cut its batches, and end on all ranks together."""
        return self.stream.prepare(dataloader, self.batch_sharding)

    def on_train_start(self) -> None:
        """Go on with the samples that a checkpoint has not seen."""
        super().on_train_start()
        self.stream.resume()

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Cut what comes from no DataLoader, then move it."""
        return super().batch_to_device(ensure_sharded(batch, self.batch_sharding), device, dataloader_idx)

    def sum_over_tokens(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks that hold different tokens; a new tensor, the same on all of them."""
        total = tensor.detach().clone()
        dist.all_reduce(total, group=self.mesh.loss_group)
        return total

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over all processes; a mean does not weigh them by tokens, and says so once."""
        if isinstance(tensor, Tensor) and reduce_op in ("mean", "avg"):
            if self.mesh.num_loss_ranks > 1 and not self._warned_of_mean:
                self._warned_of_mean = True
                rank_zero_warn(UNWEIGHTED_MEAN)
            # Lightning averages its batch sizes too; integers would be rounded down.
            tensor = tensor if tensor.is_floating_point() else tensor.double()
        return super().reduce(tensor, group, reduce_op)

    @property
    def _module(self) -> LightningModule:
        return cast("LightningModule", self.lightning_module)

    @property
    def _trainer(self) -> Trainer:
        return self._module.trainer
