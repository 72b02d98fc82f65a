from __future__ import annotations

import pytest

from lightning_longctx.cli.errors import advice, first_cause

UNKNOWN_KEY = """Parser key "trainer.strategy":
  Does not validate against any of the Union subtypes
  Subtypes: [<class 'str'>, <class 'lightning.pytorch.strategies.strategy.Strategy'>]
  Errors:
    - Expected a <class 'str'>
    - Problem with given class_path 'package.Strategy':
        Group 'degrees' does not accept option 'inner_rng'
  Given value type: <class 'dict'>
  Given value: {'class_path': 'package.Strategy', 'init_args': {'degrees': {'inner_rng': 2}}}"""

NESTED = """Parser key "model":
  Does not validate against any of the Union subtypes
  Subtypes: [<class 'lightning.pytorch.core.module.LightningModule'>, <class 'NoneType'>]
  Errors:
    - Problem with given class_path 'package.Model':
        Parser key "optimizer":
          Option 'lrr' is not accepted. Got value: Namespace(class_path='torch.optim.AdamW')
    - Expected a <class 'NoneType'>
  Given value type: <class 'dict'>
  Given value: {'class_path': 'package.Model'}"""

ONLY_ALTERNATIVES = """Parser key "trainer.devices":
  Does not validate against any of the Union subtypes
  Errors:
    - Expected a <class 'int'>
    - Expected a <class 'str'>
  Given value: {}"""


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (UNKNOWN_KEY, "trainer.strategy: package.Strategy: Group 'degrees' does not accept option 'inner_rng'"),
        (NESTED, "model: package.Model: optimizer: Option 'lrr' is not accepted"),
        (ONLY_ALTERNATIVES, ONLY_ALTERNATIVES),
        ("Subcommand 'fit' does not accept option 'x'", "Subcommand 'fit' does not accept option 'x'"),
    ],
)
def test_first_cause(message: str, expected: str) -> None:
    assert first_cause(message) == expected


def test_advice_is_for_the_keys_of_lightnings_own_command_line() -> None:
    told = advice("Subcommand 'fit' does not accept option 'optimizer.class_path'")
    assert "model.init_args.optimizer" in told
    assert "model.init_args.lr_scheduler" in advice("Subcommand 'fit' does not accept option 'lr_scheduler'")
    assert advice("Subcommand 'fit' does not accept option 'trainer.devcs'") == ""
    assert advice("Subcommand 'fit' does not accept option 'optimizers'") == ""
