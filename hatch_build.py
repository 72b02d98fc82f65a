"""A wheel carries ``kernels/`` and ``recipes/`` inside the package; an editable install reads the checkout."""

from __future__ import annotations

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ShippedFolders(BuildHookInterface):
    """Adds the two folders to wheels only: copies next to an editable install would go stale and hide the package."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before it builds ``version`` (``standard`` or ``editable``)."""
        if version == "standard":
            build_data["force_include"] |= {name: f"lightning_longctx/{name}" for name in ("kernels", "recipes")}
