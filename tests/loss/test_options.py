"""What a user may choose about the loss, and what is refused."""

from __future__ import annotations

import inspect

import pytest
import torch

from lightning_longctx.loss import TiledLoss
from tests.loss.test_linear_cross_entropy import inputs, step


def test_options() -> None:
    assert TiledLoss().is_tiled and not TiledLoss(tile_tokens=None).is_tiled
    for wrong in (0, -3, True, "many", 1.5):
        with pytest.raises(ValueError, match="loss.tile_tokens"):
            TiledLoss(tile_tokens=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="loss.kernel='cuda' must be torch or liger"):
        TiledLoss(kernel="cuda")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="loss.tile_tokens=64 conflicts with loss.kernel=liger"):
        TiledLoss(tile_tokens=64, kernel="liger")
    given = inputs(9)
    for tokens in ("auto", 4, None):
        total, count = TiledLoss(tile_tokens=tokens)(*given[:2], given[3], given[2])  # type: ignore[arg-type]
        assert torch.allclose(total, step(0, given)["total"]) and count == step(0, given)["count"]


def test_liger_says_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    given, loss = inputs(9), TiledLoss(kernel="liger")
    with pytest.raises(ValueError, match="loss.kernel=liger needs CUDA, but this run is on cpu. Use loss.kernel=torch"):
        loss(*given[:2], given[3])
    with pytest.raises(ValueError, match="needs CUDA, but this run is on cpu"):
        loss.check(torch.device("cpu"), 1)
    with pytest.raises(ValueError, match="degrees.tensor=2"):
        loss.check(torch.device("cuda"), 2)
    monkeypatch.setattr("lightning_longctx.loss.liger.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install liger-kernel"):
        loss.check(torch.device("cuda"), 1)
    with pytest.raises(ValueError, match="those of Odd are not"):
        loss.check_whole("Odd")
    TiledLoss().check(torch.device("cpu"), 8)


def test_ligers_function_takes_what_it_is_given() -> None:
    pytest.importorskip("liger_kernel", reason="needs liger-kernel")
    from lightning_longctx.loss.liger import _function

    names = list(inspect.signature(_function().forward).parameters)[1:13]
    assert names[:6] == ["_input", "weight", "target", "bias", "ce_weight", "ignore_index"]
    assert names[6:] == [
        "lse_square_scale",
        "label_smoothing",
        "reduction",
        "softcap",
        "return_z_loss",
        "accum_dtype",
    ]
