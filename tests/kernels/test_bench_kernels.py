"""``bench kernels``: the check, the table, what it leaves out and why, the search, and its refusals."""

import pytest
import torch

from lightning_longctx.attention.backends.triton import Triton
from lightning_longctx.cli import main
from lightning_longctx.cli.bench.attention_case import AttentionCase
from lightning_longctx.cli.bench.kernel_systems import kernel_systems
from lightning_longctx.cli.bench.kernel_tuning import fastest
from lightning_longctx.cli.bench.kernels import KernelBench, forward_flops


@pytest.mark.parametrize("mask", ["causal", "documents:8"])
def test_end_to_end_in_the_interpreter(interpreter, mask, capsys):
    sizes = ["--tokens", "24", "--heads", "2", "--kv_heads", "1", "--width", "16", "--dtype", "float32"]
    main(["bench", "kernels", "--device", "cpu", *sizes, "--mask", mask, "--repeats", "1", "--warmup", "1"])
    printed = capsys.readouterr().out
    assert "24 tokens, 2 heads (1 for keys and values) of width 16, float32, cpu" in " ".join(printed.split())
    rows = [line.split("│")[1].strip() for line in printed.splitlines() if line.startswith("│")]
    assert {"aten", "triton"} <= set(rows) and ("torch" in rows) == (mask == "causal")
    assert ("not timed   torch: PyTorch's flash attention knows no documents" in printed) == (mask != "causal")


def test_a_wrong_kernel_is_not_timed(interpreter, monkeypatch, capsys):
    right = Triton.backward
    monkeypatch.setattr(Triton, "backward", lambda *args: tuple(share / 2 for share in right(*args)))
    sizes = ["--tokens", "8", "--heads", "1", "--width", "16", "--dtype", "float32"]
    with pytest.raises(SystemExit) as ended:
        main(["bench", "kernels", "--device", "cpu", *sizes])
    assert ended.value.code == 1
    assert "Nothing was timed: triton does not compute what it should" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--device", "cpu", "--heads", "6", "--kv_heads", "4"], "kv_heads=4 does not divide heads=6"),
        (["--device", "cpu", "--tokens", "0"], "tokens=0 must be at least 1"),
        (["--device", "cpu", "--tune"], "tune=True needs device=cuda"),
        (["--device", "cpu", "--mask", "window"], "mask='window' lacks its number"),
    ],
)
def test_wrong_options(options, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["bench", "kernels", *options])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu():
    with pytest.raises(ValueError, match="device=cuda: PyTorch finds no CUDA GPU here. Use device=cpu"):
        KernelBench()


def test_systems_on_cuda_and_reasons():
    def names(mask, dtype="bfloat16", width=128):
        systems, reasons = kernel_systems(AttentionCase(1, 1024, 4, 4, width, dtype, mask), "cuda")
        return [system.name for system in systems], reasons

    assert {"torch", "aten", "triton"} <= set(names("causal")[0])
    able, reasons = names("window:64")
    assert "triton" in able and "torch" not in able and "window" in reasons["torch"]
    able, reasons = names("causal", "float32")
    assert able == ["triton"] and reasons["torch"] == "no torch.float32 on cuda"
    with pytest.raises(ValueError, match="no system can compute.*head width 512 is over 256"):
        names("causal", width=512)


def test_flops_count_visible_pairs():
    case = AttentionCase(1, 1024, 4, 2, 64, "bfloat16", "window:10")
    assert forward_flops(case) == 4 * 64 * 4 * (1024 * 10 - 45)


def test_the_fastest_that_fits():
    def seconds(candidate):
        if candidate == 1:
            raise MemoryError
        return float(candidate)

    assert fastest([3, 1, 2], seconds, (MemoryError,)) == (2, 2.0)
    with pytest.raises(ValueError, match="no blocks"):
        fastest([1], seconds, (MemoryError,))
    with pytest.raises(MemoryError):
        fastest([1], seconds, ())
