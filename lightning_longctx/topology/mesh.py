"""The process groups of a run, as one value."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_longctx._upstream import flatten_mesh
from lightning_longctx.topology.degrees import Degrees
from lightning_longctx.topology.neighbours import LOSS


@dataclass(frozen=True, eq=False)
class ParallelMesh:
    """Device meshes of a run.

    Args:
        degrees: Resolved degrees.
        device_mesh: All ranks, five axes named and ordered as ``degrees.axes``.
        loss: The ranks among which tokens are split, flattened (data x context x head): parameters are replicated or
            sharded over it, and gradients, losses and token counts are summed over it.
    """

    degrees: Degrees
    device_mesh: DeviceMesh
    loss: DeviceMesh

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


def build_mesh(degrees: Degrees, device_type: str) -> ParallelMesh:
    """Make the process groups; a collective over the world. Call it once per run: every call makes new groups.

    Args:
        degrees: Resolved degrees, which multiply to the world size.
        device_type: Such as ``"cpu"`` or ``"cuda"``.
    """
    # Axes in the order of ranks: a process group sorts its ranks, and places in a mesh must be places in its group.
    device_mesh = init_device_mesh(device_type, degrees.shape, mesh_dim_names=degrees.axes)
    loss = tuple(axis for axis in degrees.axes if axis in LOSS)
    return ParallelMesh(degrees, device_mesh, flatten_mesh(device_mesh, loss, "loss"))
