"""``bench step``: its options, and the run."""

from __future__ import annotations

from dataclasses import dataclass
from tempfile import TemporaryDirectory

from lightning_longctx.cli.bench.rows import check_csv, keep


@dataclass(frozen=True)
class StepBench:
    """Time a training step through Lightning and the strategy against the same step in a bare PyTorch loop.

    Runs a recipe as `fit` does, with its processes, and after each of its steps one step of the bare loop in the same
    processes: `longctx` and `bare` alternate, so that a machine that gets slower does so for both. The bare loop has
    the same model, data, attention, sharding, clipping, optimizer and schedule, and nothing else. Their losses have to
    agree in every step, or nothing counts. The recipe's callbacks stay, but for checkpoints, and its logging goes to a
    folder that is deleted; validation and accumulation are left out.

    Args:
        config: The recipe, or several in a list, of which later ones override earlier ones: files, or names of shipped
            ones. Its model must be one whose call gives logits, such as CausalLM.
        tokens: Length of a sample; sets data.init_args.seq_len.
        repeats: Timed pairs of steps; the median counts.
        warmup: Pairs before those.
        csv: File for one row a system, replaced if it exists. null writes none.

    Raises:
        ValueError: An option is out of range; the message names it.
    """

    config: str | list[str] = "quickstart.yaml"
    tokens: int = 8192
    repeats: int = 10
    warmup: int = 2
    csv: str | None = None

    def __post_init__(self) -> None:
        for name, least in (("tokens", 2), ("repeats", 1), ("warmup", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}.")
        check_csv(self.csv)

    def run(self) -> None:
        """Measure, write the CSV file and print the table: on the first process, which launches the others.

        Raises:
            WrongResultError: The two loops do not train alike.
        """
        from rich.console import Console

        from lightning_longctx.cli.bench.step_report import report, rows_of, summarise
        from lightning_longctx.cli.bench.step_run import alternate

        with TemporaryDirectory(prefix="lightning-longctx-bench-") as folder:
            trainer, by_rank = alternate(self.arguments(folder), folder)
        if not trainer.is_global_zero:
            return
        pairs = summarise(by_rank, self.warmup)
        rows = rows_of(trainer, pairs, self.tokens)
        report(Console(), rows, pairs)
        keep(self.csv, rows)

    def arguments(self, folder: str) -> list[str]:
        """What the command line of ``fit`` would be."""
        from lightning_longctx.cli.bench.step_run import fit_arguments

        return [
            *fit_arguments(self.config, folder),
            f"--data.init_args.seq_len={self.tokens}",
            f"--trainer.max_steps={self.warmup + self.repeats}",
        ]
