"""What surrounds a run: help, exit codes, quiet ranks."""

from __future__ import annotations

import logging
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from lightning_longctx.cli import COMMANDS, main
from lightning_longctx.cli.train import be_quiet


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


def output_of(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert (ended.value.code or 0) == code
    captured = capsys.readouterr()
    return captured.err if code else captured.out


def test_help_teaches_with_commands(capsys: pytest.CaptureFixture[str]) -> None:
    text = output_of(capsys, "--help")
    for example in ("fit --config quickstart.yaml", "recipes", "torchrun", "--print_config", *COMMANDS):
        assert example in text


def test_help_explains_the_options_of_the_strategy(capsys: pytest.CaptureFixture[str]) -> None:
    text = output_of(capsys, "fit", "--trainer.strategy.help", "lightning_longctx.LongContextStrategy")
    for option in ("degrees.context", "degrees.inner_ring", "layout"):
        assert f"--trainer.strategy.{option}" in text or option in text


@pytest.mark.parametrize("arguments", [[], ["fti"]])
def test_no_or_an_unknown_command_is_one_error(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    text = output_of(capsys, *arguments, code=2)
    assert text.count("error: ") == 1 and "fit" in text


def test_the_strategy_is_the_default_one(capsys: pytest.CaptureFixture[str]) -> None:
    degrees = "--trainer.strategy.init_args.degrees.context"
    printed = output_of(capsys, "fit", "--model", "lightning_longctx.CausalLM", degrees, "4", "--print_config")
    assert "class_path: lightning_longctx.LongContextStrategy" in printed
    assert "context: 4" in printed


def test_the_modules_of_the_working_directory_can_be_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    (tmp_path / "module_of_a_user.py").write_text(
        "from lightning.pytorch import LightningModule\nclass Mine(LightningModule):\n"
        "    def __init__(self, depth: int = 3): super().__init__()\n"
    )
    assert "depth: 3" in output_of(capsys, "fit", "--model", "module_of_a_user.Mine", "--print_config")


def test_further_ranks_are_quiet_but_not_about_errors() -> None:
    loggers = [logging.getLogger(name) for name in ("lightning", "lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    try:
        with warnings.catch_warnings(record=True) as caught:
            be_quiet()
            warnings.warn("once is enough", stacklevel=1)
        assert not caught
        assert all(logger.getEffectiveLevel() == logging.ERROR for logger in loggers)
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def test_python_m_runs_the_command_without_waiting_for_torch() -> None:
    code = "import sys; from lightning_longctx.cli import main; main(['recipes']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode == 0
    command = [sys.executable, "-m", "lightning_longctx", "recipes"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "quickstart.yaml" in done.stdout
