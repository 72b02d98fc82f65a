"""``CausalLM(pretrained=...)``: weights of a file on every rank, whatever the degrees, also across a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from lightning_longctx.data import PretrainedTokenizer, TextDataModule
from lightning_longctx.mixins import CausalLM, causal_lm
from lightning_longctx.mixins.causal_lm import check_vocabulary
from lightning_longctx.models import DecoderConfig, save_pretrained
from lightning_longctx.models.pretrained.sources import pretrained_weights
from lightning_longctx.strategy import LongContextStrategy
from lightning_longctx.strategy.gradients.norms import whole
from lightning_longctx.strategy.parameters.sharding import materialise
from lightning_longctx.testing import FLOAT32, assert_all_close_relative
from lightning_longctx.topology import Degrees
from tests.mixins.modules import SGD, TINY, Recorder, make_trainer
from tests.models.tiny_gguf import CONFIG, random_state, write_gguf
from tests.strategy.runs import QUIET


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf"))


def batches(count: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(7)
    rows = torch.randint(CONFIG.vocab_size, (count, 64), generator=generator)
    return DataLoader([{"input_ids": row, "labels": row.clone()} for row in rows], batch_size=1)


def fine_tune(
    source: str,
    degrees: Degrees,
    steps: int,
    folder: Path,
    resume: Path | None = None,
    sharding: Literal["replicate", "fsdp"] = "replicate",
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights; the checkpoint is called after the number of steps."""
    module, recorder = CausalLM(optimizer=SGD, pretrained=source), Recorder()
    strategy = LongContextStrategy(degrees, sharding=sharding)
    trainer = Trainer(
        strategy=strategy,
        devices=dist.get_world_size(),
        max_steps=steps,
        callbacks=[recorder],
        use_distributed_sampler=False,
        **QUIET,
    )
    trainer.fit(module, batches(1), ckpt_path=resume)  # always the same batch: loaders begin anew after a checkpoint
    trainer.save_checkpoint(folder / f"{steps}.ckpt")
    return recorder.steps, {name: whole(weight.detach()).clone() for name, weight in module.named_parameters()}


def test_shape_and_weights_are_those_of_the_file(file: str) -> None:
    module = CausalLM(pretrained=file)
    assert module.config == CONFIG and module.attention_heads == (4, 2)
    assert not list(module.parameters())
    module.configure_model()
    assert_all_close_relative(module.decoder.state_dict(), random_state(), rtol=0)
    assert all(weight.requires_grad and weight.is_leaf for weight in module.parameters())


def test_the_same_from_a_hugging_face_folder_in_bfloat16(tmp_path: Path) -> None:
    save_pretrained(CONFIG, random_state(), tmp_path / "saved", dtype=torch.bfloat16)
    module = CausalLM(pretrained=str(tmp_path / "saved"))
    module.configure_model()
    rounded = {name: weight.bfloat16().float() for name, weight in random_state().items()}
    assert {weight.dtype for weight in module.parameters()} == {torch.float32}
    assert_all_close_relative(module.decoder.state_dict(), rounded, rtol=0)


def test_precision_and_device_of_the_trainer_apply(file: str) -> None:
    module = CausalLM(pretrained=file)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):  # as under Trainer.init_module(empty_init=True)
            module.configure_model()
    finally:
        torch.set_default_dtype(before)
    materialise(module, torch.device("cpu"))
    rounded = {name: weight.bfloat16() for name, weight in random_state().items()}
    assert {weight.dtype for weight in module.parameters()} == {torch.bfloat16}
    assert_all_close_relative(module.decoder.state_dict(), rounded, rtol=0)


def test_a_decoder_that_says_something_else_is_refused(file: str) -> None:
    assert CausalLM(CONFIG, pretrained=file).config == CONFIG
    for decoder, named in (
        (DecoderConfig(), "decoder.vocab_size=257"),
        (DecoderConfig(**{**vars(CONFIG), "rope_base": 5e5}), "decoder.rope_base=500000.0"),
    ):
        with pytest.raises(ValueError, match=f"{named} conflicts with pretrained=.*decoder: null"):
            CausalLM(decoder, pretrained=file)


def test_ids_that_the_model_does_not_know_are_refused(tmp_path: Path, file: str) -> None:
    texts = TextDataModule(str(tmp_path), PretrainedTokenizer(file, eos="<|endoftext|>"))
    check_vocabulary(texts, CONFIG.vocab_size, file)
    check_vocabulary(None, 1, file)
    with pytest.raises(ValueError, match=f"the data has {CONFIG.vocab_size} token ids.*the model knows 257"):
        check_vocabulary(texts, 257, None)
    with pytest.warns(UserWarning, match="tokenizer is a ByteTokenizer"):
        check_vocabulary(TextDataModule(str(tmp_path)), CONFIG.vocab_size, file)


def test_a_model_asks_its_data(gloo, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="the data has 257 token ids"):
        gloo(1).run(fit_bytes, str(tmp_path))


def fit_bytes(cache: str) -> None:
    make_trainer(Degrees()).fit(
        CausalLM(TINY), datamodule=TextDataModule(__file__, seq_len=64, validation_fraction=0, cache_dir=cache)
    )


def test_a_missing_file_is_named_at_construction(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="pretrained=.*absent.gguf does not exist"):
        CausalLM(pretrained=str(tmp_path / "absent.gguf"))


@pytest.mark.parametrize(("num_ranks", "sharding"), [(2, "replicate"), (4, "fsdp")])
def test_fine_tuning_equals_one_process(gloo, file: str, tmp_path: Path, num_ranks: int, sharding: str) -> None:
    losses, expected = gloo(1).run(fine_tune, file, Degrees(), 2, tmp_path)[0]
    degrees = Degrees(context=num_ranks)
    for found, weights in gloo(num_ranks).run(fine_tune, file, degrees, 2, tmp_path / "spread", sharding=sharding):
        assert found == pytest.approx(losses, rel=FLOAT32)
        assert_all_close_relative(weights, expected)


def test_training_goes_on_from_a_checkpoint_and_not_from_the_file(gloo, file: str, tmp_path: Path) -> None:
    losses, expected = gloo(2).run(fine_tune, file, Degrees(context=2), 4, tmp_path)[0]
    first, _ = gloo(2).run(fine_tune, file, Degrees(context=2), 2, tmp_path)[0]
    rest, weights = gloo(2).run(fine_tune, file, Degrees(context=2), 4, tmp_path / "rest", tmp_path / "2.ckpt")[0]
    assert first + rest == pytest.approx(losses, rel=FLOAT32)
    assert_all_close_relative(weights, expected)


def test_weights_are_read_once(gloo, file: str) -> None:
    assert gloo(1).run(fit_and_validate, file) == [1]


def fit_and_validate(source: str) -> int:
    """How often weights are read in fit, validate and another fit of one module."""
    reads = []

    def counted(name: str) -> dict[str, torch.Tensor]:
        reads.append(name)
        return pretrained_weights(name)

    before, causal_lm.pretrained_weights = causal_lm.pretrained_weights, counted
    try:
        module = CausalLM(optimizer=SGD, pretrained=source)
        trainer = make_trainer(Degrees(), max_steps=2, num_sanity_val_steps=0)
        trainer.fit(module, batches(2))
        trainer.validate(module, batches(2))
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module, batches(2))
    finally:
        causal_lm.pretrained_weights = before
    return len(reads)
