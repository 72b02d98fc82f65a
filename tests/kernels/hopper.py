"""Compile what a launch would launch, for Hopper, on a machine without a GPU."""

from __future__ import annotations

import triton
from triton.backends.compiler import GPUTarget

from lightning_longctx.kernels import attention, merge
from lightning_longctx.kernels.jit import Kernel

SHARED_BYTES = 227 * 1024
"""What one program may use."""


class Driver:
    """As much of Triton's driver as it asks while it compiles."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def compile_only(monkeypatch, folder):
    """Until the test ends, kernels launched on CPU tensors are compiled for Hopper, down to machine code, and not run.

    Returns:
        A dict that fills with what Triton made, by name of the kernel.
    """
    made = {}

    def run(kernel, *args, grid, warmup, **kwargs):
        made[kernel.__name__] = super(Kernel, kernel).run(*args, grid=grid, warmup=True, **kwargs)
        kernel.device_caches.clear()  # it belongs to this driver, not to a GPU that the machine may have
        return made[kernel.__name__]

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver())
    monkeypatch.setattr(Kernel, "run", run)
    for module in (attention, merge):
        monkeypatch.setattr(module, "check_device", lambda tensor: None)
    return made
