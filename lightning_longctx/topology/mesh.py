"""The process groups of a run, as one value."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_longctx._upstream import flatten_mesh, unflatten_mesh
from lightning_longctx.topology.degrees import Degrees
from lightning_longctx.topology.neighbours import LOSS


@dataclass(frozen=True, eq=False)
class ParallelMesh:
    """Device meshes of a run.

    Args:
        degrees: Resolved degrees.
        device_mesh: All ranks, five axes named and ordered as ``degrees.axes``.
        loss: The ranks among which tokens are split, flattened (data x context x head): gradients, losses and token
            counts are summed over it.
        parameters: The same ranks as parameters are distributed over them: ``loss`` itself, or in two axes, replicate x
            shard, of which neighbours shard.
    """

    degrees: Degrees
    device_mesh: DeviceMesh
    loss: DeviceMesh
    parameters: DeviceMesh

    @property
    def num_loss_ranks(self) -> int:
        """Ranks that hold different tokens (F in the loss rule)."""
        return self.loss.size()

    @property
    def loss_rank(self) -> int:
        """This process's place among them."""
        return self.loss.get_local_rank()

    @property
    def loss_group(self) -> ProcessGroup:
        """Process group of ``loss``."""
        return self.loss.get_group()

    @property
    def data_group(self) -> ProcessGroup:
        """Ranks at this process's place on all axes but data."""
        return self.device_mesh.get_group("data")


def build_mesh(degrees: Degrees, device_type: str, shard_ranks: int | None = None) -> ParallelMesh:
    """Make the process groups; a collective over the world. Call it once per run: every call makes new groups.

    Args:
        degrees: Resolved degrees, which multiply to the world size.
        device_type: Such as ``"cpu"`` or ``"cuda"``.
        shard_ranks: How many neighbouring ranks of ``loss`` share one replica of the parameters; must divide their
            number. None if parameters have one axis.
    """
    # Axes in the order of ranks: a process group sorts its ranks, and places in a mesh must be places in its group.
    device_mesh = init_device_mesh(device_type, degrees.shape, mesh_dim_names=degrees.axes)
    loss = flatten_mesh(device_mesh, tuple(axis for axis in degrees.axes if axis in LOSS), "loss")
    if shard_ranks is None:
        return ParallelMesh(degrees, device_mesh, loss, loss)
    parameters = unflatten_mesh(loss, (loss.size() // shard_ranks, shard_ranks), ("replicate", "shard"))
    return ParallelMesh(degrees, device_mesh, loss, parameters)
