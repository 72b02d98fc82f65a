"""``bench memory``: its options, and the run."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lightning_longctx.cli.bench.gate import WrongResultError
from lightning_longctx.cli.bench.memory.outcome import DDP, LONGCTX, Outcome, receive
from lightning_longctx.cli.bench.rows import check_csv, keep
from lightning_longctx.memory.policy import GIB, PolicyName

POLICIES: tuple[PolicyName, ...] = ("none", "full", "selective")
DEFAULTS = {"tokens": 8192, "warmup": 1, "repeats": 2}
BUDGET_DEFAULTS = {"tokens": 512, "resolution": 0.05}


_LEAST = {"tokens": 2, "max_tokens": 2, "warmup": 1, "repeats": 1, "auto_budgets": 2}


@dataclass(frozen=True)
class MemoryBench:
    """Memory and time of a training step by what backward keeps, or the longest sequence that trains within a budget.

    Runs a recipe as `fit` does, with its processes, model, strategy and optimizer, on random tokens: one sequence a
    step and data rank. Data, callbacks, loggers, validation and accumulation are left out. Memory is what a step takes
    beyond what was there before it (parameters, optimizer state), on the process where that is most: of the resident
    set of the process, or on CUDA of what tensors occupy.

    Without a budget the policies of `checkpointing` take turns, step by step, in one run; the recipe's keep, recompute
    and (but for auto) offload are left out. With one, steps of growing
    length show the longest sequence that fits; then the same model in plain Lightning DDP does so, with whole sequences
    on every process, F.scaled_dot_product_attention and whole logits.

    Args:
        config: The recipe, or several in a list, of which later ones override earlier ones: files, or names of shipped
            ones. With a budget its model must be CausalLM.
        tokens: Length of a sequence (8192 if null); with a budget, the length to begin at (512 if null).
        policies: Names to compare; null is none, full and selective. auto measures and solves first, under the
            recipe's checkpointing.budget_gib or for auto_budgets. Not with a budget: there the recipe's own policy
            counts.
        auto_budgets: How many plans auto solves for and policies are compared with, for budgets at equal distances from
            what full takes to what none takes; null is one, for the recipe's checkpointing.budget_gib.
        budget_gib: What a step may take on a process, in GiB; null compares policies.
        max_tokens: With a budget, a length that is not exceeded; null sets no limit.
        resolution: With a budget, how much longer, as a share, a sequence may be that fits and is not found (0.05 if
            null).
        warmup: Rounds of the policies before the timed ones (1 if null). Not with a budget.
        repeats: Timed rounds; the median counts (2 if null). Not with a budget.
        csv: File for one row a policy, or a system; replaced if it exists. null writes none.

    Raises:
        ValueError: An option is out of range, or does not go with another; the message names it.
    """

    config: str | list[str] = "memory_bench.yaml"
    tokens: int | None = None
    policies: list[PolicyName] | None = None
    auto_budgets: int | None = None
    budget_gib: float | None = None
    max_tokens: int | None = None
    resolution: float | None = None
    warmup: int | None = None
    repeats: int | None = None
    csv: str | None = None

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            if (value := getattr(self, name)) is not None and value < least:
                raise ValueError(f"{name}={value} must be at least {least}.")
        if self.budget_gib is not None and not 0 < self.budget_gib < math.inf:
            raise ValueError(f"budget_gib={self.budget_gib} must be positive and finite.")
        if self.resolution is not None and not 0 < self.resolution < 1:
            raise ValueError(f"resolution={self.resolution} must be above 0 and below 1.")
        if self.policies is not None and (not self.policies or len(set(self.policies)) < len(self.policies)):
            raise ValueError(f"policies={self.policies} must name at least one policy, and none of them twice.")
        if self.auto_budgets is not None and "auto" not in (self.policies or ()):
            raise ValueError(f"auto_budgets={self.auto_budgets}: policies must name auto, and what to compare it with.")
        self._check_combination()
        check_csv(self.csv)

    def _check_combination(self) -> None:
        if self.budget_gib is None:
            unused, why = ("max_tokens", "resolution"), "without budget_gib no sequence is searched for"
        else:
            unused, why = (
                ("policies", "auto_budgets", "warmup", "repeats"),
                "with budget_gib the recipe's own policy is tried, step by step",
            )
        for name in unused:
            if (value := getattr(self, name)) is not None:
                raise ValueError(f"{name}={value}: {why}. Leave one of the two out.")

    @property
    def num_tokens(self) -> int:
        """``tokens``, or what it is by default."""
        defaults = DEFAULTS if self.budget_gib is None else BUDGET_DEFAULTS
        return int(defaults["tokens"]) if self.tokens is None else self.tokens

    @property
    def policy_names(self) -> tuple[PolicyName, ...]:
        """The policies to compare; with a budget, none."""
        if self.budget_gib is not None:
            return ()
        return POLICIES if self.policies is None else tuple(self.policies)

    @property
    def rounds(self) -> tuple[tuple[PolicyName, ...], int, int, int, int | None]:
        """Policies, tokens, warm-up rounds, timed rounds and budgets of auto."""
        warmup = DEFAULTS["warmup"] if self.warmup is None else self.warmup
        repeats = DEFAULTS["repeats"] if self.repeats is None else self.repeats
        return self.policy_names, self.num_tokens, warmup, repeats, self.auto_budgets

    @property
    def search_limits(self) -> dict[str, Any]:
        """Options of ``search.Search``."""
        assert self.budget_gib is not None
        return {
            "budget": int(self.budget_gib * GIB),
            "start": self.num_tokens,
            "resolution": BUDGET_DEFAULTS["resolution"] if self.resolution is None else self.resolution,
            "max_tokens": self.max_tokens,
        }

    def run(self) -> None:
        """Measure, write the CSV file and print the table. Every system runs in processes of its own.

        Raises:
            WrongResultError: Policies do not do what they say, or torchrun has started this process.
            SystemExit: A run has failed, and has said why on stderr.
        """
        from lightning.pytorch.plugins.environments import SLURMEnvironment
        from rich.console import Console

        from lightning_longctx.cli.bench.memory.report import check, report, rows_of

        if "TORCHELASTIC_RUN_ID" in os.environ or SLURMEnvironment.detect():
            raise WrongResultError(
                "bench memory starts its processes itself, one run after another: start it without torchrun or srun."
            )
        systems = (LONGCTX,) if self.budget_gib is None else (LONGCTX, DDP)
        with TemporaryDirectory(prefix="lightning-longctx-bench-") as folder:
            found = [outcome for system in systems for outcome in self._measure(system, Path(folder))]
        check(found)
        rows = rows_of(found)
        report(Console(), found, self.budget_gib)
        keep(self.csv, rows)

    def _measure(self, system: str, folder: Path) -> list[Outcome]:
        request, result = folder / f"{system}_request.json", folder / f"{system}.json"
        request.write_text(
            json.dumps({"bench": asdict(self), "system": system, "folder": str(folder)}), encoding="utf-8"
        )
        command = [sys.executable, "-m", "lightning_longctx.cli.bench.memory.run", str(request)]
        # Nobody can change what the profiler and the allocator say of themselves.
        quiet = {"KINETO_LOG_LEVEL": "99", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        code = _run(command, {**quiet, **os.environ})
        if code != 0:
            raise SystemExit(code if code > 0 else 128 - code)
        return receive(result) if result.exists() else []


def _run(command: list[str], environment: dict[str, str]) -> int:
    """Run a program to its end; a signal to end this process ends it first. Returns its exit code."""
    with subprocess.Popen(command, env=environment) as process:
        before = signal.signal(signal.SIGTERM, lambda number, frame: process.send_signal(number))
        try:
            return process.wait()
        except KeyboardInterrupt:
            process.terminate()  # it may have had the Ctrl-C as well, or not
            process.wait()
            raise SystemExit(130) from None
        finally:
            signal.signal(signal.SIGTERM, before)
