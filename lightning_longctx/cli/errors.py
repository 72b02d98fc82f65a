"""One clear message from jsonargparse's report on a Union of types."""

from __future__ import annotations

import re

_NOISE = re.compile(
    r"""^(?:-\ )?(?:
        Does\ not\ validate\ against\ any\ of\ the\ Union\ subtypes
      | Subtypes:.*
      | Errors:
      | Expected\ a\ <class.*       # the alternatives that were not meant: str where a strategy is given, say
      | Given\ value\ type:.*
      | Given\ value:.*
    )$""",
    re.VERBOSE,
)
_HEADING = re.compile(r"(?:Parser key \"(?P<key>.*)\"|Problem with given class_path '(?P<path>.*)'):$")


def first_cause(message: str) -> str:
    """Drop the alternatives that a Union does not mean, and join the path to the mistake into one line.

    ``Parser key "trainer.strategy": Does not validate against any of the Union subtypes ... Group 'degrees' does not
    accept option 'inner_rng' ...`` becomes ``trainer.strategy: package.Class: Group 'degrees' does not accept option
    'inner_rng'``. A message in which nothing else remains is returned as it is.
    """
    if "Union subtypes" not in message:
        return message
    path, causes = [], []
    for line in map(str.strip, message.splitlines()):
        if _NOISE.match(line) or not line:
            continue
        line = line.removeprefix("- ")
        if heading := _HEADING.match(line):
            path.append(heading["key"] or heading["path"])
        else:
            causes.append(re.sub(r"\.? Got value: .*", "", line))
    return ": ".join([*path, "; ".join(causes)]) if causes else message


def advice(message: str) -> str:
    """What to do about a key that LightningCLI users expect and this command line does not have."""
    if key := re.search(r"does not accept option '(optimizer|lr_scheduler)\b", message):
        return (
            f". Here it is an option of the model: write it as model.init_args.{key[1]} (a key at the top would be "
            "given parameters that sharding replaces later, and would train nothing)."
        )
    return ""
