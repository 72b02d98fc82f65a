"""The ready language model in less memory: backward keeps the input of every block only, and computes the rest again.

A token of SmolLM2-135M then keeps 2 KiB a layer instead of 40 KiB, for a third more work. Attention runs again, too,
and with it the ring.
"""

from __future__ import annotations

from functools import partial

from torch.utils.checkpoint import checkpoint

from lightning_longctx import CausalLM


class RecomputingLM(CausalLM):
    """``CausalLM`` whose blocks are recomputed in backward (``torch.utils.checkpoint``); options are the same."""

    def configure_model(self) -> None:
        """Build the decoder, once, and wrap the forward of its blocks."""
        if hasattr(self, "decoder"):
            return
        super().configure_model()
        for block in self.decoder.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
