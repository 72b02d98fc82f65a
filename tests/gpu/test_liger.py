"""liger-kernel's loss on a real GPU has the numbers of tiles."""

import pytest
import torch

from lightning_longctx.loss import TiledLoss

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
pytest.importorskip("liger_kernel", reason="needs liger-kernel")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernel", ["torch", "liger"])
def test_the_numbers_of_float64(kernel, dtype):
    torch.manual_seed(0)
    states = torch.randn(2, 500, 128, dtype=torch.float64)
    weight = torch.randn(5000, 128, dtype=torch.float64) * 0.1
    labels = torch.randint(5000, (2, 500), device="cuda")
    labels[:, ::7] = -100
    results = []
    for chosen, loss in ((torch.float64, TiledLoss()), (dtype, TiledLoss(kernel=kernel))):
        given = [each.to("cuda", chosen).requires_grad_() for each in (states, weight)]
        total, count = loss(*given, labels)
        results.append([total.detach(), *torch.autograd.grad(total / count, given)])
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-3  # products of float32 may run in TF32
    for actual, expected in zip(*results[::-1], strict=True):
        assert (actual.double() - expected).norm() <= tolerance * expected.norm()
