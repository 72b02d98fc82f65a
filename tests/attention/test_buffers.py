"""Buffers are reused, never shared, and bounded."""

import torch

from lightning_longctx.attention.buffers import Buffers

CPU = torch.device("cpu")


def test_a_buffer_is_used_again_and_never_by_two():
    buffers = Buffers()
    first = buffers.take((2, 3), torch.float32, CPU)
    second = buffers.take((2, 3), torch.float32, CPU)
    assert first.shape == (2, 3) and first.data_ptr() != second.data_ptr()
    address = first.data_ptr()
    buffers.give(first)
    assert buffers.take((3, 2), torch.float64, CPU).data_ptr() != address, "another dtype"
    assert buffers.take((3, 2), torch.float32, CPU).data_ptr() == address


def test_about_the_same_size_fits_and_another_does_not():
    buffers = Buffers()
    address = (whole := buffers.take((100,), torch.float32, CPU)).data_ptr()
    buffers.give(whole)
    assert (small := buffers.take((10,), torch.float32, CPU)).data_ptr() != address
    assert (near := buffers.take((90,), torch.float32, CPU)).data_ptr() == address and near.shape == (90,)
    buffers.give(small), buffers.give(near)


def test_what_waits_takes_no_more_than_was_in_use_at_once():
    buffers = Buffers()
    for size in range(100, 10_000, 100):
        buffers.give(buffers.take((size,), torch.float32, CPU))
    free = [flat for sizes in buffers._free.values() for flats in sizes.values() for flat in flats]
    assert sum(flat.nbytes for flat in free) <= 10_000 * 4


def test_nothing_is_something():
    buffers = Buffers()
    buffers.give(buffers.take((0, 4), torch.float32, CPU))
