"""Who talks to whom: degrees, and which ranks form a group.

Both are pure. ``topology.mesh``, which makes the process groups, needs torch and is imported by its own name.
"""

from lightning_longctx.topology.degrees import AXES, Degrees
from lightning_longctx.topology.links import Links
from lightning_longctx.topology.neighbours import CONTEXT, LOSS, axis_groups, axis_rank, group_of

__all__ = ["AXES", "CONTEXT", "LOSS", "Degrees", "Links", "axis_groups", "axis_rank", "group_of"]
