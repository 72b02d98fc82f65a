"""The subcommand: parse the options of one bench, check them, run it."""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Sequence

from jsonargparse import ArgumentParser, DefaultHelpFormatter

from lightning_longctx.cli.bench.attention import AttentionBench
from lightning_longctx.cli.bench.gate import WrongResultError
from lightning_longctx.cli.bench.kernels import KernelBench
from lightning_longctx.cli.bench.loss import LossBench
from lightning_longctx.cli.bench.memory import MemoryBench
from lightning_longctx.cli.bench.ring import RingBench
from lightning_longctx.cli.bench.step import StepBench
from lightning_longctx.testing.cluster import ClusterUnavailableError

BENCHES = {
    "attention": AttentionBench,
    "ring": RingBench,
    "kernels": KernelBench,
    "step": StepBench,
    "loss": LossBench,
    "memory": MemoryBench,
}
"""What can be timed: name -> a frozen dataclass. Its fields are the options, making one checks them, ``run()`` runs."""

DESCRIPTION = """Time a part of this package on this machine, in one run side by side with what it is measured against.

  lightning-longctx bench attention --ranks 2 --tokens 16384 --csv attention.csv
  lightning-longctx bench attention --ranks 4 --inner_ring 2 --tokens 8192 --layout striped
  lightning-longctx bench attention --heads 16 --kv_heads 4 --dtype bfloat16
  lightning-longctx bench attention --mask documents:256 --peers
  lightning-longctx bench ring --nodes 2 --ranks_per_node 4 --nic_mbit 100
  lightning-longctx bench kernels --heads 32 --kv_heads 8    on a GPU: ours against flash-attn and PyTorch's
  lightning-longctx bench step --config quickstart.yaml      what Lightning and the strategy cost in a step
  lightning-longctx bench loss --peers                       the head and its cross entropy, in tiles and whole
  lightning-longctx bench memory --config memory_bench.yaml  what backward keeps, by policy; --budget_gib 1 for
                                                             the longest sequence
  lightning-longctx bench attention --help                   every option, explained
"""


class _Formatter(argparse.RawDescriptionHelpFormatter, DefaultHelpFormatter):
    """Keeps the lines of the description."""


def main(argv: Sequence[str]) -> None:
    """``lightning-longctx bench NAME [options]``.

    Raises:
        SystemExit: With code 2 if an option is wrong, after one message on stderr that names it; with code 1 if a
            system computes something else than it should, so that its time would mean nothing, or this machine cannot
            emulate a cluster.
    """
    parser = _parser()
    options = parser.parse_args(list(argv))
    name = options.subcommand
    try:
        bench = BENCHES[name](**options[name].as_dict())
    except ValueError as problem:
        parser.error(f"{name}: {problem}")
    try:
        bench.run()
    except (WrongResultError, ClusterUnavailableError) as problem:
        print(f"Nothing was timed: {problem}", file=sys.stderr)
        raise SystemExit(1) from problem


def _parser() -> ArgumentParser:
    prog = "lightning-longctx bench"
    style = {"formatter_class": _Formatter, "allow_abbrev": False}
    parser = ArgumentParser(prog=prog, usage=f"{prog} NAME [options]", description=DESCRIPTION, **style)
    benches = parser.add_subcommands(required=True, metavar="NAME")
    for name, bench in BENCHES.items():
        summary, _, _ = inspect.cleandoc(bench.__doc__ or "").partition("\n\nArgs:")
        options = ArgumentParser(usage="%(prog)s [options]", description=summary, **style)
        options.add_class_arguments(bench)
        for action in options._actions:
            if isinstance(action.default, bool):  # --peers alone means --peers true
                action.nargs, action.const = "?", True
        benches.add_subcommand(name, options, help=summary.partition("\n")[0])
        options.prog = f"{prog} {name}"  # without the parent's usage line in between
    return parser
