"""Kept activations that wait elsewhere: what comes back, what it costs, and what happens when it cannot."""

from __future__ import annotations

import gc
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_longctx.memory.offloading.file_store import FileStore
from lightning_longctx.memory.offloading.host_store import HostStore
from lightning_longctx.memory.offloading.offload import open_store
from tests.memory.later_copies import LaterCopies

CPU = torch.device("cpu")


def host_store(_: Path) -> HostStore:
    return HostStore(CPU, LaterCopies())


STORES = {"file": FileStore, "host": host_store}


@pytest.fixture(params=list(STORES))
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    made = STORES[request.param](tmp_path)
    yield made
    made.close()


def values(dtype: torch.dtype, *shape: int) -> Tensor:
    whole = torch.arange(2 * torch.Size(shape).numel()).reshape(*shape[:-1], -1) if shape else torch.tensor(3)
    return (whole % 2 == 0) if dtype == torch.bool else (whole % 100).to(dtype)


@pytest.mark.parametrize("prefetched", [False, True])
@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.bool, torch.int64],
    ids=lambda dtype: str(dtype).removeprefix("torch."),
)
def test_tensors_come_back_as_they_were(store: Any, dtype: torch.dtype, prefetched: bool) -> None:
    whole = values(dtype, 3, 4, 5)
    tensors = [
        whole,
        whole.transpose(0, 1),
        whole.permute(2, 0, 1),
        whole[1:, :, 2:4],  # gaps
        whole[:, :, ::2],
        whole[0, 0].expand(6, -1),  # one element many times
        whole[:0],
        values(dtype)[...],
        torch.nn.Parameter(whole[1]) if dtype.is_floating_point else whole[1],
    ]
    places = [store.put(tensor) for tensor in tensors]
    assert store.num_waiting == len(tensors)
    if prefetched:
        for place in places:
            store.prefetch(place)
            store.prefetch(place)  # a second time is nothing
    for tensor, place in reversed(list(zip(tensors, places, strict=True))):
        back = place.get()
        assert torch.equal(back, tensor) and back.dtype == tensor.dtype
        assert back.shape == tensor.shape and back.stride() == tensor.stride()
        assert back.numel() == 0 or back.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()
        assert not back.requires_grad
    assert store.num_waiting == 0


def test_special_views(store: Any) -> None:
    tensor = torch.complex(torch.randn(3, 2), torch.randn(3, 2)).conj()
    assert torch.equal(store.put(tensor).get(), tensor)
    with torch.inference_mode():
        inference = torch.randn(3)
    assert torch.equal(store.put(inference).get(), inference)


def test_a_place_is_emptied_once(store: Any) -> None:
    place = store.put(torch.randn(3))
    assert place.num_bytes == 12
    place.get()
    with pytest.raises(RuntimeError, match=r"shape \(3,\) was fetched already.*retain_graph"):
        place.get()


def test_slots_are_used_again(store: Any) -> None:
    def step() -> None:
        places = [store.put(torch.full((5000,), float(value))) for value in range(4)]
        for value in reversed(range(4)):
            assert (places.pop().get() == value).all()

    step()
    held = [store.put(torch.zeros(5000)) for _ in range(4)]
    most = store.num_bytes
    held.clear()
    for _ in range(5):
        step()
        dropped = [store.put(torch.zeros(5000)) for _ in range(3)]  # an aborted step
        store.prefetch(dropped[1])
        del dropped
        gc.collect()
        assert store.num_waiting == 0 and store.num_bytes <= most


def test_a_dropped_tensor_does_not_harm_the_next_in_its_slot(store: Any) -> None:
    for value in range(20):
        dropped = store.put(torch.full((3000,), -1.0))
        store.prefetch(dropped)
        del dropped
        place = store.put(torch.full((3000,), float(value)))
        assert (place.get() == value).all()


def test_memory_that_a_copy_still_fills_is_not_given_to_others() -> None:
    copies = LaterCopies()
    store = HostStore(CPU, copies)
    dropped = store.put(torch.ones(8))
    store.prefetch(dropped)
    arriving = dropped.arrival
    assert not copies.is_done(arriving)
    del dropped
    gc.collect()
    store.put(torch.ones(8))
    assert copies.is_done(arriving), "later work did not wait for it"
    store.close()


def test_what_has_no_plain_memory_is_refused(store: Any) -> None:
    with pytest.raises(TypeError, match="plain tensors"):
        store.put(torch.eye(3).to_sparse())
    with pytest.raises(TypeError, match="the tensor is on meta"):
        store.put(torch.empty(3, device="meta"))


def test_a_closed_store_says_so(store: Any) -> None:
    place = store.put(torch.randn(3))
    store.close()
    store.close()
    for call in (place.get, partial(store.put, torch.randn(3)), partial(store.prefetch, place)):
        with pytest.raises(RuntimeError, match="store of offloaded activations is closed"):
            call()


def test_devices_without_a_store() -> None:
    with pytest.raises(ValueError, match="checkpointing.offload works on CPU and CUDA, not on meta"):
        open_store(torch.device("meta"))
    open_store(CPU).close()
