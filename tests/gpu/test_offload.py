"""Kept activations in pinned host memory on a real GPU: what comes back, in which order, and what is free meanwhile."""

from __future__ import annotations

import gc

import pytest
import torch

from lightning_longctx.memory.offloading.host_store import HostStore
from lightning_longctx.memory.offloading.offload import open_store

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
CUDA = torch.device("cuda", 0)
NUM_ELEMENTS = 1 << 24  # 64 MiB in float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.uint8])
@pytest.mark.parametrize("prefetched", [False, True])
def test_tensors_come_back_as_they_were(dtype, prefetched):
    store = open_store(CUDA)
    whole = torch.randint(2, (3, 40, 50), device=CUDA).to(dtype)
    tensors = [whole, whole.transpose(0, 1), whole[:, :, 2:9], whole[:0], whole[0, 0, 0]]
    places = [store.put(tensor) for tensor in tensors]
    for place in places if prefetched else ():
        store.prefetch(place)
    for tensor, place in reversed(list(zip(tensors, places, strict=True))):
        back = place.get()
        assert torch.equal(back, tensor) and back.stride() == tensor.stride() and back.device == tensor.device
    store.close()


def test_work_before_and_after_keeps_its_order():
    """Written just before ``put``, dropped at once, its memory written over; read just after ``get``."""
    store = open_store(CUDA)
    matrix = torch.randn(4096, 4096, device=CUDA)
    for _ in range(3):
        places = []
        for value in range(6):
            for _ in range(20):
                matrix @ matrix  # the copy must wait for this
            tensor = torch.full((NUM_ELEMENTS,), float(value), device=CUDA)
            places.append(store.put(tensor))
            del tensor
            torch.full((NUM_ELEMENTS,), -1.0, device=CUDA)
        for value in reversed(range(6)):
            place = places.pop()
            if places:
                store.prefetch(places[-1])
            back = place.get()
            assert ((back + 0) == value).all()
            del back
    store.close()


def test_device_memory_is_free_meanwhile():
    store = HostStore(CUDA)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    places = [store.put(torch.full((NUM_ELEMENTS,), float(value), device=CUDA)) for value in range(16)]
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before <= 2 * 4 * NUM_ELEMENTS
    assert torch.cuda.max_memory_allocated() - before <= 3 * 4 * NUM_ELEMENTS
    assert all((places.pop().get() == value).all() for value in reversed(range(16)))
    held = store.num_bytes
    for _ in range(3):
        dropped = [store.put(torch.ones(NUM_ELEMENTS, device=CUDA)) for _ in range(16)]
        store.prefetch(dropped[0])
        del dropped
        gc.collect()
        assert store.num_waiting == 0
    assert store.num_bytes == held
    store.close()
    assert torch.cuda.memory_allocated() - before <= 4 * NUM_ELEMENTS


def test_the_host_does_not_wait():
    store = open_store(CUDA)
    matrix = torch.randn(8192, 8192, device=CUDA)
    store.put(torch.ones(NUM_ELEMENTS, device=CUDA)).get()  # host memory is there
    torch.cuda.synchronize()
    for _ in range(50):
        matrix @ matrix
    queued = torch.cuda.Event()
    queued.record()
    place = store.put(torch.ones(NUM_ELEMENTS, device=CUDA))
    store.prefetch(place)
    back = place.get()
    assert not queued.query(), "the host waited for the device"
    assert (back == 1).all()
    store.close()
