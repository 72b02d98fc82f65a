"""``lightning-longctx bench``: how fast is it here, side by side with one process?"""

from lightning_longctx.cli.bench.command import BENCHES, main

__all__ = ["BENCHES", "main"]
