"""The DataModule: samples, loaders, what it says, and what it refuses."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jsonargparse import ArgumentParser
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lightning_longctx.data import ByteTokenizer, Packing, PadCollate, TextDataModule, unigram_entropy

TEXTS = {f"document_{index}.txt": f"Text number {index}. " * (index % 7 + 1) for index in range(40)}


@pytest.fixture(autouse=True)
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "text").mkdir()
    for name, text in TEXTS.items():
        (tmp_path / "text" / name).write_text(text)
    return tmp_path / "text"


def ready(folder: Path, **options: Any) -> TextDataModule:
    data = TextDataModule(path=str(folder), **{"seq_len": 32, "validation_fraction": 0.3, **options})
    data.prepare_data()
    data.setup()
    return data


def texts(loader: Any) -> list[str]:
    return [ByteTokenizer().decode(row[row != -100].numpy()) for batch in loader for row in batch["labels"]]


def test_samples_are_unshifted_int64_windows(folder: Path) -> None:
    data = ready(folder, batch_size=3)
    batch = next(iter(data.train_dataloader()))
    assert set(batch) == {"input_ids", "labels"}
    assert batch["input_ids"].shape == (3, 32)
    assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64
    assert torch.equal(batch["input_ids"], batch["labels"])
    assert batch["input_ids"].data_ptr() != batch["labels"].data_ptr()


@pytest.mark.parametrize("packing", ["concat", "document"])
def test_train_and_validation_share_no_token(folder: Path, packing: str) -> None:
    data = ready(folder, packing=packing, seq_len=8)
    loaders: Any = (data.train_dataloader(), data.val_dataloader())
    train, validation = ([*places(loader.dataset.packing)] for loader in loaders)
    assert len(set(train) | set(validation)) == len(train) + len(validation) > 0.9 * sum(map(len, TEXTS.values()))


def test_packed_windows_are_those_of_concat_with_positions_of_documents(folder: Path) -> None:
    packed, concat = (ready(folder, packing=name, batch_size=2).val_dataloader() for name in ("packed", "concat"))
    restarts = 0
    for batch, other in zip(packed, concat, strict=True):
        assert batch["position_ids"].dtype == torch.int64 and "position_ids" not in other
        assert torch.equal(batch["input_ids"], other["input_ids"])
        for tokens, positions in zip(batch["input_ids"].tolist(), batch["position_ids"].tolist(), strict=True):
            expected = 0
            for token, position in zip(tokens, positions, strict=True):
                assert position == expected
                expected = 0 if token == 256 else expected + 1  # every document ends with its own token
            restarts += positions.count(0) - 1
    assert restarts > 5


def places(packing: Packing) -> Iterator[int]:
    return (place for index in range(len(packing)) for piece in packing.pieces(index) for place in piece)


def test_documents_stay_whole_and_on_one_side(folder: Path) -> None:
    data = ready(folder, packing="document", seq_len=1000)
    train, validation = texts(data.train_dataloader()), texts(data.val_dataloader())
    assert sorted(train + validation) == sorted(TEXTS.values())


def test_document_packing_pads_with_ignored_labels(folder: Path) -> None:
    data = ready(folder, packing="document", batch_size=40, seq_len=1000)
    batch = next(iter(data.val_dataloader()))
    padding = batch["labels"] == -100
    lengths = (~padding).sum(1)
    assert lengths.min() < lengths.max() == padding.shape[1]
    assert torch.equal(padding, torch.arange(padding.shape[1]) >= lengths[:, None])
    assert torch.equal(batch["input_ids"][~padding], batch["labels"][~padding])
    assert (batch["input_ids"][padding] == 256).all()


def test_pad_collate_by_hand() -> None:
    def sample(*tokens: int) -> dict[str, Tensor]:
        return {"input_ids": torch.tensor(tokens), "labels": torch.tensor(tokens)}

    collate = pickle.loads(pickle.dumps(PadCollate(pad_id=9)))
    batch = collate([sample(1, 2, 3), sample(4)])
    assert batch["input_ids"].tolist() == [[1, 2, 3], [4, 9, 9]]
    assert batch["labels"].tolist() == [[1, 2, 3], [4, -100, -100]]


def test_training_is_shuffled_and_validation_is_not(folder: Path) -> None:
    data = ready(folder, batch_size=1)
    torch.manual_seed(0)
    first, second = texts(data.train_dataloader()), texts(data.train_dataloader())
    assert first != second
    assert sorted(first) == sorted(second)
    ordered = texts(data.val_dataloader())
    assert ordered == texts(data.val_dataloader()) == texts(data.test_dataloader()) == texts(data.predict_dataloader())


def test_workers_give_the_same_samples(folder: Path) -> None:
    loader = ready(folder, packing="document", num_workers=1).test_dataloader()
    assert loader.persistent_workers
    assert texts(loader) == texts(ready(folder, packing="document").val_dataloader())


@pytest.mark.parametrize("packing", ["concat", "packed", "document"])
def test_spawned_workers_get_a_small_pickle(folder: Path, packing: str) -> None:
    loader: Any = ready(folder, packing=packing).val_dataloader()
    pickled = pickle.dumps((loader.dataset, loader.collate_fn))
    assert len(pickled) < 2000
    dataset, collate = pickle.loads(pickled)
    assert texts([collate([sample]) for sample in map(dataset.__getitem__, range(len(dataset)))]) == texts(loader)


def test_limits(folder: Path) -> None:
    data = ready(folder, max_tokens=900, seq_len=2, packing="document")
    tokens = [
        batch["labels"].numel() for loader in (data.train_dataloader(), data.val_dataloader()) for batch in loader
    ]
    assert 850 <= sum(tokens) <= 900
    few = ready(folder, max_documents=20, seq_len=1000, packing="document")
    assert len(few.train_dataloader()) + len(few.val_dataloader()) == 20


def test_says_sizes_entropy_and_that_documents_see_each_other(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        data = ready(folder)
        data.setup("fit")
    validation = texts(ready(folder, packing="document", seq_len=1000).val_dataloader())
    tokens = [token for text in validation for token in (*text.encode(), 256)]
    assert data.validation_unigram_entropy == pytest.approx(unigram_entropy(torch.tensor(tokens).numpy()))
    said = [record.getMessage() for record in caplog.records]
    assert sum("see each other" in message for message in said) == 1
    assert sum(f"loss of {data.validation_unigram_entropy:.3f} nats" in message for message in said) >= 1
    assert any(f"{len(validation)} validation documents of {len(tokens):,} tokens" in message for message in said)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seq_len": 1}, "seq_len=1"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"packing": "best"}, "packing='best'"),
        ({"validation_fraction": 1.0}, "validation_fraction=1.0"),
        ({"validation_fraction": -0.1}, "validation_fraction=-0.1"),
        ({"max_documents": 0}, "max_documents=0"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"num_workers": -1}, "num_workers=-1"),
    ],
)
def test_options_out_of_range_are_refused_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TextDataModule(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"validation_fraction": 1e-9}, "validation_fraction=1e-09 leaves no validation documents.*seed"),
        ({"validation_fraction": 1 - 1e-9}, "leaves no training documents"),
        ({"seq_len": 100_000}, r"seq_len=100000 needs more than the [\d,]+ tokens of the \d+ training documents"),
        ({"seq_len": 1500, "validation_fraction": 0.2}, "seq_len=1500 needs more than .* validation documents"),
    ],
)
def test_too_little_text_is_refused_with_the_way_out(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ready(folder, **options)


def test_setup_without_prepare_data_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"call prepare_data\(\) first"):
        TextDataModule(path=str(folder)).setup()


def test_building_it_touches_nothing(tmp_path: Path) -> None:
    TextDataModule()
    assert not (tmp_path / "cache").exists()


class Counter(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(257))
        self.seen = {"fit": 0, "validate": 0, "test": 0, "predict": 0}

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        self.seen["fit"] += batch["input_ids"].numel()
        return self.weight[batch["labels"]].sum()

    def validation_step(self, batch: dict[str, Tensor]) -> None:
        self.seen["validate"] += batch["input_ids"].numel()

    def test_step(self, batch: dict[str, Tensor]) -> None:
        self.seen["test"] += batch["input_ids"].numel()

    def predict_step(self, batch: dict[str, Tensor]) -> None:
        self.seen["predict"] += batch["input_ids"].numel()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fraction", [0.3, 0.0])
def test_trainer_runs_all_stages(folder: Path, tmp_path: Path, fraction: float) -> None:
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(accelerator="cpu", max_epochs=1, num_sanity_val_steps=0, default_root_dir=tmp_path, **options)
    data = TextDataModule(str(folder), seq_len=32, validation_fraction=fraction)
    model = Counter()
    trainer.fit(model, datamodule=data)
    assert model.seen["fit"] == 32 * len(data.train_dataloader())
    if fraction:
        trainer.test(model, datamodule=data, verbose=False)
        trainer.predict(model, datamodule=data)
        assert 0 < model.seen["validate"] == model.seen["test"] == model.seen["predict"]
    else:
        assert model.seen["validate"] == 0
        with pytest.raises(ValueError, match="validation_fraction=0 leaves no documents to test with"):
            trainer.test(model, datamodule=data, verbose=False)


class OwnTokenizer:
    vocab_size = 300
    eos_id = 0
    fingerprint = "own"

    def encode(self, text: str) -> np.ndarray:
        return np.array([1 + byte for byte in text.encode()])

    def decode(self, tokens: np.ndarray) -> str:
        return bytes(token - 1 for token in tokens if token).decode()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("tokenizer", "vocab_size"),
    [("lightning_longctx.data.ByteTokenizer", 257), (f"{__name__}.OwnTokenizer", 300)],
)
def test_options_from_a_recipe(folder: Path, tokenizer: str, vocab_size: int) -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(TextDataModule, "data")
    recipe = {
        "class_path": "lightning_longctx.data.TextDataModule",
        "init_args": {
            "path": str(folder),
            "tokenizer": {"class_path": tokenizer},
            "packing": "document",
            "seq_len": 1000,
            "validation_fraction": 0.3,
            "max_tokens": 3000,
        },
    }
    parsed = parser.parse_object({"data": recipe})
    assert parser.parse_string(parser.dump(parsed)) == parsed
    data: TextDataModule = parser.instantiate_classes(parsed)["data"]
    assert type(data.tokenizer).__name__ == tokenizer.rpartition(".")[2]
    assert (data.packing, data.max_tokens, data.vocab_size) == ("document", 3000, vocab_size)
    data.prepare_data()
    data.setup()
    sample = next(iter(data.test_dataloader()))["input_ids"][0].numpy()
    assert data.tokenizer.decode(sample) in TEXTS.values()
