"""``bench memory``: what policies of checkpointing take, and the longest sequence that trains within a budget."""

from lightning_longctx.cli.bench.memory.bench import MemoryBench

__all__ = ["MemoryBench"]
