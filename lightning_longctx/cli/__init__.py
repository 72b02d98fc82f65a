"""The command line: ``lightning-longctx fit|validate|test|predict|bench|explain|export|recipes``."""

from lightning_longctx.cli.main import COMMANDS, main

__all__ = ["COMMANDS", "main"]
