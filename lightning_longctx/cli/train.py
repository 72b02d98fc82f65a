"""``fit``, ``validate``, ``test`` and ``predict``: LightningCLI for long sequences."""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_longctx.cli.cores import share_cores
from lightning_longctx.cli.errors import advice, first_cause
from lightning_longctx.cli.recipes import with_shipped_recipes

DEBUG = "JSONARGPARSE_DEBUG"
"""jsonargparse's own switch: if true, an error keeps its traceback."""

DESCRIPTION = """Train on long sequences with PyTorch Lightning, from one YAML recipe.

  lightning-longctx recipes                                  list the shipped recipes, or copy one
  lightning-longctx fit --config quickstart.yaml             train; a bare name may be a shipped recipe
  lightning-longctx fit --config mine.yaml --config fsdp.yaml --trainer.max_steps 100
                                                             later files and options override earlier ones
  lightning-longctx validate --config mine.yaml --ckpt_path lightning_logs/mine/version_0/checkpoints/last.ckpt
                                                             score a checkpoint; fit with --ckpt_path goes on from it
  lightning-longctx fit --config mine.yaml --print_config > full.yaml
                                                             every option of the run with its value
  lightning-longctx fit --trainer.strategy.help lightning_longctx.LongContextStrategy
  lightning-longctx fit --model.help lightning_longctx.CausalLM
                                                             the options of one class, explained
  lightning-longctx explain --help                           what layout, schedule and backend `auto` takes, and why
  lightning-longctx export --help                            turn a checkpoint into a Hugging Face folder
  lightning-longctx consolidate --help                       turn a checkpoint directory into one file
  lightning-longctx bench --help                             time ring attention on this machine

Lightning starts trainer.devices processes itself. To start them with torchrun instead, on one node or many:

  torchrun --nproc-per-node 4 -m lightning_longctx fit --config quickstart.yaml
"""


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of the description."""


class Parser(LightningArgumentParser):
    """LightningCLI's parser with short errors: one message that names the option, and exit code 2."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        super().error(first_cause(message) + advice(message), ex)


class LongContextCLI(LightningCLI):
    """LightningCLI that takes any model and data class and refuses wrong options before anything is launched.

    The optimizer is an option of the model (``OptimizerCallable``): LightningCLI's own ``optimizer:`` key would be
    given parameters that sharding replaces later, and would train nothing. It does not exist here.
    """

    def __init__(self, args: ArgsType = None) -> None:
        usage = {"usage": "%(prog)s [options]"}
        names = self.subcommands()
        super().__init__(
            LightningModule,
            LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            auto_configure_optimizers=False,
            seed_everything_default=1,
            save_config_kwargs={"overwrite": True},
            trainer_defaults={"strategy": {"class_path": "lightning_longctx.LongContextStrategy"}},
            parser_class=Parser,
            parser_kwargs={
                "prog": "lightning-longctx",
                "description": DESCRIPTION,
                "formatter_class": _Formatter,
                **{name: dict(usage) for name in names},
            },
            args=args,
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        arguments = sys.argv[1:] if args is None else args
        if isinstance(arguments, list):
            self.config = parser.parse_args(with_shipped_recipes(arguments))
        else:
            self.config = parser.parse_object(arguments)

    def instantiate_classes(self) -> None:
        try:  # the Trainer's strategy checks its degrees here, too
            super().instantiate_classes()
        except (ValueError, MisconfigurationException) as problem:
            self._parser(self.subcommand).error(f"{problem} (Set {DEBUG}=true for a traceback.)", problem)

    def before_validate(self) -> None:
        """Refuse what would score weights that were never trained."""
        self._refuse_last()

    def before_test(self) -> None:
        """See ``before_validate``."""
        self._refuse_last()

    def before_predict(self) -> None:
        """See ``before_validate``."""
        self._refuse_last()

    def _refuse_last(self) -> None:
        # Every run has a folder of its own, so Lightning would find nothing there, warn, and take the initial weights.
        command = str(self.subcommand)
        if self.config[command].get("ckpt_path") == "last":
            self._parser(command).error(
                f"ckpt_path=last means nothing to {command}, whose run is a new one without checkpoints. Give the path "
                "of the checkpoint, such as lightning_logs/quickstart/version_0/checkpoints/last.ckpt."
            )

    def after_instantiate_classes(self) -> None:
        share_cores(self.trainer.num_devices)


def train(arguments: Sequence[str]) -> None:
    """Run one of Lightning's commands; returns when it has ended."""
    speak_once()
    LongContextCLI(_arguments(arguments))


def _arguments(arguments: Sequence[str]) -> Any:
    # LightningCLI wants to read sys.argv itself: further processes repeat it.
    return None if list(arguments) == sys.argv[1:] else list(arguments)


def speak_once() -> None:
    """Let the first process speak alone, and not of what no user can change."""
    # Lightning asks torch's pytrees in a way that torch has renamed.
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")
    if rank_zero_only.rank != 0:
        be_quiet()


def be_quiet() -> None:
    """Say things once, not once per process. Errors still come from every process."""
    warnings.simplefilter("ignore")
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
