"""One run of a bench, in processes of its own: ``python -m lightning_longctx.cli.bench.memory.run REQUEST``.

``MemoryBench`` starts it. It is a program because Lightning starts further processes by repeating the command line, and
because of two runs the second shall not inherit the memory of the first.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_only

from lightning_longctx.cli.bench.gate import WrongResultError
from lightning_longctx.cli.bench.memory.bench import MemoryBench
from lightning_longctx.cli.bench.memory.meter import Step
from lightning_longctx.cli.bench.memory.metered import MeteredSteps
from lightning_longctx.cli.bench.memory.outcome import DDP, LONGCTX, Outcome, hand_over
from lightning_longctx.cli.bench.memory.plain import PlainCausalLM, check_plain
from lightning_longctx.cli.bench.memory.rounds import Rounds
from lightning_longctx.cli.bench.memory.samples import RandomTokenData, RandomTokens
from lightning_longctx.cli.bench.memory.search import Search
from lightning_longctx.cli.bench.memory.trials import Trials
from lightning_longctx.cli.bench.step_report import kind_of_run
from lightning_longctx.cli.bench.step_run import fit_arguments
from lightning_longctx.cli.train import LongContextCLI, speak_once
from lightning_longctx.memory.policy import GIB
from lightning_longctx.mixins import CausalLM
from lightning_longctx.sequence import padding_multiple
from lightning_longctx.strategy import LongContextStrategy

MORE_THAN_ENOUGH_GIB = 2**20

SHAPE = "decoder.json"
"""Where the run of ``LONGCTX`` leaves the shape of its model for that of ``DDP``."""


def _with_policies(bench: MemoryBench, folder: Path) -> Path:
    """A recipe that comes after the user's: what it keeps, of which the policies take the place."""
    kept: dict[str, Any] = {"policy": "full", "keep": [], "recompute": [], "offload": [], "budget_gib": None}
    if "auto" in bench.policy_names:
        kept = {"policy": "auto", "keep": [], "recompute": []}
        if bench.auto_budgets is not None:  # the plan of the run itself will not be used
            kept["budget_gib"] = MORE_THAN_ENOUGH_GIB
    strategy = {"class_path": "lightning_longctx.LongContextStrategy", "init_args": {"checkpointing": kept}}
    path = folder / "policies.yaml"
    path.write_text(json.dumps({"trainer": {"strategy": strategy}}), encoding="utf-8")  # JSON is YAML
    return path


class MeasuredRun(LongContextCLI):
    """``fit`` with random samples and nothing but the measuring around the steps.

    Args:
        bench: What to measure.
        system: ``LONGCTX`` for the recipe, or ``DDP`` for its plain twin.
        folder: For what the runs of a bench leave for each other.
    """

    conductor: Rounds | Trials

    def __init__(self, bench: MemoryBench, system: str, folder: Path) -> None:
        self._bench, self._system, self._folder = bench, system, folder
        arguments = fit_arguments(bench.config, str(folder))
        if system == DDP:
            shape = json.loads((folder / SHAPE).read_text(encoding="utf-8"))
            twin = {"class_path": f"{PlainCausalLM.__module__}.PlainCausalLM", "init_args": {"decoder": shape}}
            arguments += ["--trainer.strategy=ddp", f"--model={json.dumps(twin)}"]
        elif bench.policy_names:
            arguments += ["--config", str(_with_policies(bench, folder))]
        super().__init__([*arguments, "--trainer.max_steps=-1"])

    def after_instantiate_classes(self) -> None:
        super().after_instantiate_classes()
        try:
            if self._system == LONGCTX:
                self._check_recipe()
            samples = RandomTokens(self._vocab_size(), 1)
        except ValueError as problem:
            self._parser(self.subcommand).error(str(problem))
        self.datamodule = RandomTokenData(samples)
        self.conductor = Rounds(*self._bench.rounds) if self._bench.budget_gib is None else self._trials()
        self.trainer.callbacks = [MeteredSteps(samples, self.conductor)]  # type: ignore[attr-defined]
        self.trainer.loggers = []

    def outcomes(self) -> list[Outcome]:
        """What was measured, once training has ended.

        Raises:
            WrongResultError: No sequence fits the budget.
        """
        if isinstance(self.conductor, Rounds):
            num_timed = self._bench.rounds[3]
            return [
                replace(
                    self._outcome(name, self._bench.num_tokens, steps[-num_timed:]),
                    allocated=steps[-num_timed - 1].allocated,
                    **(promise._asdict() if (promise := self.conductor.promises.get(name)) else {}),
                )
                for name, steps in self.conductor.steps.items()
            ]
        if self.conductor.longest is None:
            shortest = self.conductor.shortest
            raise WrongResultError(
                f"budget_gib={self._bench.budget_gib}: a step of {self._system} with a sequence of {shortest.tokens} "
                f"tokens takes {shortest.growth / GIB:.3g} GiB. Set a larger one."
            )
        trial, step = self.conductor.longest
        capped = not self.conductor.search.may_exceed(trial.tokens)
        return [self._outcome(self.conductor.policy, trial.tokens, [step], capped=capped)]

    def _outcome(self, case: str, tokens: int, steps: Sequence[Step], capped: bool = False) -> Outcome:
        return Outcome(
            case=case,
            system=self._system,
            ranks=self.trainer.world_size,
            tokens=tokens,
            seconds=tuple(step.seconds for step in steps),
            growth=max(step.growth for step in steps),
            allocated=None,
            sent=steps[-1].sent,
            rings=steps[-1].rings,
            kind=kind_of_run(self.trainer),
            capped=capped,
        )

    def _check_recipe(self) -> None:
        if not isinstance(self.trainer.strategy, LongContextStrategy):
            raise ValueError(
                f"trainer.strategy is a {type(self.trainer.strategy).__name__}, and what is measured is the memory of "
                "LongContextStrategy."
            )
        if self._bench.budget_gib is None:
            return
        if self.trainer.strategy.memory.options.policy == "auto":
            raise ValueError(
                "checkpointing.policy=auto chooses for one length, and with --budget_gib lengths change. Use selective "
                "or full."
            )
        if not isinstance(self.model, CausalLM):
            raise ValueError(
                f"model is a {type(self.model).__name__}: only CausalLM has a plain twin, which budget_gib is compared "
                "with. Leave budget_gib out to compare policies."
            )
        check_plain(self.model.config)
        if self.trainer.global_rank == 0:
            (self._folder / SHAPE).write_text(json.dumps(asdict(self.model.config)), encoding="utf-8")

    def _vocab_size(self) -> int:
        for source in (getattr(self.model, "config", None), self.datamodule):
            if isinstance(found := getattr(source, "vocab_size", None), int):
                return found
        raise ValueError(
            f"neither model.config of {type(self.model).__name__} nor the data module has a vocab_size, so that no "
            "tokens can be drawn. Give one of them the attribute."
        )

    def _trials(self) -> Trials:
        multiple = 1
        if isinstance(self.trainer.strategy, LongContextStrategy):
            degrees = self.trainer.strategy.degrees
            multiple = padding_multiple("zigzag", degrees.context, degrees.head, degrees.tensor)
        most = self._bench.max_tokens
        if most is not None and most < multiple:
            raise WrongResultError(f"max_tokens={most} is below {multiple}, of which lengths are multiples here.")
        return Trials(self._system, Search(**self._bench.search_limits, multiple=multiple))


def main(argv: Sequence[str]) -> None:
    """Run what a request says: a JSON file of ``bench`` (options of ``MemoryBench``), ``system`` and ``folder``.

    The first process writes ``SYSTEM.json`` into the folder (see ``outcome``).

    Raises:
        SystemExit: With code 1 if nothing can be measured; the message is on stderr.
    """
    request = json.loads(Path(argv[0]).read_text(encoding="utf-8"))
    system, folder = request["system"], Path(request["folder"])
    speak_once()
    warnings.filterwarnings("ignore", message=".*LightningCLI's args parameter.*")
    try:
        done = MeasuredRun(MemoryBench(**request["bench"]), system, folder)
        if done.trainer.is_global_zero:
            hand_over(folder / f"{system}.json", done.outcomes())
    except WrongResultError as problem:
        if rank_zero_only.rank == 0:
            print(f"Nothing was measured: {problem}", file=sys.stderr)
        raise SystemExit(1) from problem


if __name__ == "__main__":
    main(sys.argv[1:])
