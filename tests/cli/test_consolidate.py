"""A directory of many ranks becomes one file, from which Lightning and this package go on as from the directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_longctx import Degrees, LongContextStrategy
from lightning_longctx.cli import main
from tests.cases.tiny import QUIET
from tests.strategy.modules import Plain, samples
from tests.strategy.runs import weights

RECIPE: dict[str, Any] = dict(betas=(0.8, 0.9), eps=1e-3)


class Grouped(Plain):
    """Groups of its optimizer are in another order than its parameters; one parameter is frozen, one never used."""

    def __init__(self, width: int = 3) -> None:
        super().__init__(tied=True)
        self.save_hyperparameters()
        self.unused = torch.nn.Linear(width, width)
        self.positions.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        trained = [(name, weight) for name, weight in self.named_parameters() if weight.requires_grad]
        groups = [
            {"params": [weight for _, weight in trained if weight.ndim < 2], "weight_decay": 0.0},
            {"params": [weight for _, weight in reversed(trained) if weight.ndim > 1], "lr": 0.02},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.01, **RECIPE)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def training_step(self, batch: dict[str, Any]) -> Tensor:
        if "shift_labels" not in batch:  # plain Lightning: no strategy cuts the batch and shifts its labels
            labels = torch.nn.functional.pad(batch.pop("labels")[:, 1:], (0, 1), value=-100)
            positions = torch.arange(labels.shape[1])[None].expand_as(labels)
            batch = {**batch, "shift_labels": labels, "position_ids": positions}
        return super().training_step(batch)


def train(num_ranks: int, steps: int, resume: Path | None, save: Path | None, distributed: bool = True) -> dict:
    torch.manual_seed(3)
    strategy = LongContextStrategy(Degrees(context=num_ranks), sharding="fsdp", save_distributed_checkpoint=distributed)
    module = Grouped()
    trainer = Trainer(strategy=strategy, devices=num_ranks, max_steps=steps, **QUIET)
    trainer.fit(module, DataLoader(samples(8)), ckpt_path=resume)  # type: ignore[arg-type]
    if save is not None:
        trainer.save_checkpoint(save)
    return weights(module)


def plain(steps: int, resume: Path | None) -> dict[str, Tensor]:
    torch.manual_seed(4)
    module: LightningModule = Grouped()
    trainer = Trainer(max_steps=steps, **QUIET)
    trainer.fit(module, DataLoader(samples(8)[2:]), ckpt_path=resume)  # type: ignore[arg-type]
    return module.state_dict()


def assert_close(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, weight in one.items():
        torch.testing.assert_close(weight, other[name], rtol=1e-5, atol=1e-6, msg=name)


def test_every_reader_goes_on_from_the_file(gloo: Any, tmp_path: Path, capsys: Any) -> None:
    folder, file = tmp_path / "half.ckpt", tmp_path / "whole.ckpt"
    half = gloo(2).run(train, 2, 2, None, folder)[0]
    expected = gloo(2).run(train, 2, 4, folder, None)[0]
    main(["consolidate", str(folder), str(file)])
    assert capsys.readouterr().out.strip() == str(file)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["half.ckpt", "whole.ckpt"]
    loaded = Grouped.load_from_checkpoint(file).state_dict()
    assert all(torch.equal(loaded[name], weight) for name, weight in half.items())
    assert_close(gloo(1).run(train, 1, 4, file, None)[0], expected)
    assert_close(gloo(2).run(train, 2, 4, file, None)[0], expected)
    # Lightning alone begins the epoch anew, hence with the samples that are left; weights and moments are there.
    assert_close(gloo(1).run(plain, 4, file)[0], expected)


def test_one_file_is_saved_as_it_is_consolidated(gloo: Any, tmp_path: Path) -> None:
    folder, file, other = tmp_path / "half.ckpt", tmp_path / "whole.ckpt", tmp_path / "saved.ckpt"
    gloo(2).run(train, 2, 2, None, folder)
    gloo(2).run(train, 2, 2, None, other, False)
    main(["consolidate", str(folder), str(file)])
    (state,), (saved,) = (torch.load(path, weights_only=True)["optimizer_states"] for path in (file, other))
    assert [group["params"] for group in state["param_groups"]] == [group["params"] for group in saved["param_groups"]]
    assert state["param_groups"] == saved["param_groups"] and state["param_groups"][0]["betas"] == (0.8, 0.9)
    assert state["state"].keys() == saved["state"].keys()
    for number, entries in state["state"].items():
        assert all(torch.equal(value, saved["state"][number][key]) for key, value in entries.items())


def refused(capsys: Any, *arguments: object) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["consolidate", *map(str, arguments)])
    assert ended.value.code == 2
    return " ".join(capsys.readouterr().err.split())


def test_refusals_and_weights_alone(gloo: Any, tmp_path: Path, capsys: Any) -> None:
    folder, file = tmp_path / "half.ckpt", tmp_path / "whole.ckpt"
    gloo(1).run(train, 1, 1, None, folder)
    main(["consolidate", str(folder), str(file), "--optimizers", "false"])
    assert "optimizer_states" not in torch.load(file, weights_only=True)
    assert f"{file} exists already: choose another name" in refused(capsys, folder, file)
    assert f"{file} is one file already. Give the directory" in refused(capsys, file, tmp_path / "new")
    assert "is no directory with meta.pt" in refused(capsys, tmp_path, tmp_path / "new")
    with pytest.raises(Exception, match="has no state of the optimizer: it holds weights only"):
        gloo(1).run(train, 1, 2, file, None)
    rest = torch.load(folder / "meta.pt", weights_only=True)
    torch.save({name: value for name, value in rest.items() if name != "longctx"}, folder / "meta.pt")
    assert "does not say in which order its optimizers have their parameters" in refused(capsys, folder, tmp_path / "n")
    assert not (tmp_path / "n").exists()
