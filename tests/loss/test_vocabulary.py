"""Cross entropy of logits in parts of the vocabulary equals that of whole logits, values and gradients."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lightning_longctx.loss import token_cross_entropy

LABELS = {
    "some": [0, 5, 6, 11, -100, 3],
    "none": [-100] * 6,
    "last": [11, 11, 11, 11, 11, -100],
}


def cut(logits: Tensor) -> DTensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor",))
    return distribute_tensor(logits, mesh, [Shard(-1)], src_data_rank=None)


def split_and_whole(size: int, labels: list[int], dtype: torch.dtype, scale: float = 1.0) -> tuple[list[Tensor], ...]:
    """Mean loss, number of labels and gradient of logits [2, 3, V], cut and whole."""
    torch.manual_seed(3)
    logits = torch.randn(6, size, dtype=torch.float64).mul(scale).to(dtype).unflatten(0, (2, 3))
    results = []
    for given in (cut(logits), logits.clone()):
        given.requires_grad_()
        total, count = token_cross_entropy(given, torch.tensor(labels).view(2, 3))
        mean = total / count.clamp(min=1)
        mean.backward()
        gradient = given.grad.full_tensor() if isinstance(given, DTensor) else given.grad
        results.append([mean.detach(), count, gradient])
    return tuple(results)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("labels", list(LABELS))
@pytest.mark.parametrize("size", [12, 33])
def test_equals_the_cross_entropy_of_whole_logits(gloo, world, labels, size):
    for split, whole in gloo(world).run(split_and_whole, size, LABELS[labels], torch.float64):
        for part, expected in zip(split, whole, strict=True):
            torch.testing.assert_close(part, expected, rtol=1e-12, atol=1e-12)


def test_the_value_that_was_reported(gloo):
    """A label of -100 is neither counted in the mean nor looked up."""
    for split, _ in gloo(2).run(split_and_whole, 12, LABELS["some"], torch.float64):
        assert float(split[0]) == pytest.approx(2.81917, abs=5e-6)


def test_a_rank_without_any_of_the_vocabulary_takes_part(gloo):
    """Five ids over four ranks are 2, 2, 1 and 0."""
    for split, whole in gloo(4).run(split_and_whole, 5, [0, 4, 2, 3, -100, 1], torch.float32):
        torch.testing.assert_close(split, whole, rtol=1e-6, atol=1e-7)


def test_large_logits_do_not_overflow(gloo):
    for split, whole in gloo(2).run(split_and_whole, 12, LABELS["some"], torch.float32, 1e4):
        torch.testing.assert_close(split, whole)


def test_narrow_logits_are_computed_in_float32(gloo):
    for split, whole in gloo(2).run(split_and_whole, 12, LABELS["some"], torch.bfloat16):
        assert split[0].dtype == torch.float32
        torch.testing.assert_close(split, whole)


def what_is_refused() -> list[str]:
    torch.manual_seed(0)
    logits, labels, said = torch.randn(6, 12), torch.zeros(6, dtype=torch.int64), []
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor",))
    by_tokens = distribute_tensor(logits, mesh, [Shard(0)], src_data_rank=None)
    for given, wanted in ((by_tokens, labels), (cut(logits), labels + 12), (cut(logits), labels - 1)):
        with pytest.raises(ValueError) as refused:
            token_cross_entropy(given, wanted)
        said.append(str(refused.value))
    whole = distribute_tensor(logits, mesh, [Replicate()], src_data_rank=None)
    total, _ = token_cross_entropy(whole, labels)
    torch.testing.assert_close(total, F.cross_entropy(logits, labels, reduction="sum"))
    return said


def test_other_cuts_and_labels_are_refused(gloo):
    for cut_by_tokens, too_large, negative in gloo(2).run(what_is_refused):
        assert "Shard(-1)" in cut_by_tokens
        assert "vocabulary of 12" in too_large
        assert "vocabulary of 12" in negative
