"""What a run shows: tokens per second, gradient norm, peak memory, learning rate.

All write through Lightning's logging, at optimizer steps, so that every curve has the loss's x-axis.
"""

from lightning_longctx.callbacks.gradient_norm import GradientNorm
from lightning_longctx.callbacks.learning_rate import LearningRate
from lightning_longctx.callbacks.memory import PeakMemory
from lightning_longctx.callbacks.throughput import ThroughputCallback

__all__ = ["GradientNorm", "LearningRate", "PeakMemory", "ThroughputCallback"]
