"""SIGTERM, and SLURM's signal to requeue: they come to any rank at any time, and all stop between the same two steps.

A handler only remembers. Before each step the ranks ask one another, in place of Lightning's broadcast from rank 0,
which would not know of a signal to another rank.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_longctx import _upstream
from lightning_longctx.strategy.failure.watch import STOPPED

TERMINATE, REQUEUE = 0, 1


class StopRequests:
    """Signals that came to this rank, and what all ranks do about theirs.

    Args:
        wait_for_saves: Returns when checkpoints that are being written are complete.
    """

    def __init__(self, wait_for_saves: Callable[[], None] = lambda: None) -> None:
        self._device = torch.device("cpu")
        self._wait_for_saves = wait_for_saves
        self._received = [False, False]

    def connect(self, trainer: Trainer, device: torch.device) -> None:
        """Take over the signals of a trainer's next run, for as long as Lightning would handle them.

        Args:
            trainer: Has not registered its handlers yet.
            device: Where the world's backend can send from.
        """
        self._device, self._received = device, [False, False]
        _upstream.take_signals(trainer, lambda *_: self.receive(TERMINATE), lambda *_: self.receive(REQUEUE))
        _upstream.before_each_batch(trainer, lambda: self.before_training_batch(trainer))

    def receive(self, what: int) -> None:
        """Remember a signal."""
        self._received[what] = True

    def agreed(self) -> list[int | None]:
        """A rank that was told to terminate, and one that was told to requeue; a collective over the world."""
        rank = dist.get_rank()
        told = torch.tensor([rank if received else -1 for received in self._received], device=self._device)
        dist.all_reduce(told, dist.ReduceOp.MAX)
        return [None if found < 0 else found for found in told.tolist()]

    def before_training_batch(self, trainer: Trainer) -> None:
        """Save and requeue, or stop, if any rank was told to; not within an accumulation window.

        Raises:
            SIGTERMException: On every rank.
        """
        if trainer.fit_loop.epoch_loop.batch_progress.current.ready % trainer.accumulate_grad_batches:
            return
        terminate, requeue = self.agreed()
        if requeue is not None:
            self.requeue(trainer, requeue)
        if terminate is not None:
            self._stop(trainer, f"rank {terminate} received SIGTERM")

    def before_evaluation_batch(self, trainer: Trainer) -> None:
        """Stop if any rank was told to. To requeue waits for the next training step: a half validation is no state.

        Raises:
            SIGTERMException: On every rank.
        """
        terminate, requeue = self.agreed()
        if requeue is not None and trainer.state.fn != TrainerFn.FITTING:
            self.requeue(trainer, requeue)
        if terminate is not None:
            self._stop(trainer, f"rank {terminate} received SIGTERM")

    def requeue(self, trainer: Trainer, rank: int) -> None:
        """Save for a job that is to go on later, put it back into SLURM's queue, and stop.

        The checkpoint is the one that Lightning looks for; evaluation alone has nothing to save.
        """
        self._received[REQUEUE] = False
        rank_zero_info(f"rank {rank} was told to requeue.")
        if trainer.state.fn == TrainerFn.FITTING:
            trainer.save_checkpoint(trainer.strategy.broadcast(_upstream.hpc_save_path(trainer)))
            self._wait_for_saves()
        failure = trainer.strategy.broadcast(requeue_job(os.environ) if trainer.is_global_zero else None)
        if not failure:
            self._stop(trainer, "the job was requeued")
        rank_zero_warn(f"{failure}: the run goes on, and the checkpoint for the next job is there.")

    def _stop(self, trainer: Trainer, why: str) -> None:
        rank_zero_info(f"{why}: all ranks stop before training batch {trainer.fit_loop.epoch_loop.batch_idx + 1}.")
        _upstream.mark_terminated(trainer)
        raise SIGTERMException(STOPPED)  # Lightning's own has exit code 0, as if the run were over


def requeue_command(environment: Mapping[str, str]) -> list[str]:
    """What puts this job, or this task of a job array, back into SLURM's queue.

    Raises:
        ValueError: The variables name no job.
    """
    job = environment.get("SLURM_JOB_ID", "")
    if "SLURM_ARRAY_JOB_ID" in environment:
        job = f"{environment['SLURM_ARRAY_JOB_ID']}_{environment.get('SLURM_ARRAY_TASK_ID', '')}"
    if not re.fullmatch("[0-9]+(_[0-9]+)?", job):
        raise ValueError(f"SLURM's variables name no job to requeue: {job!r}.")
    return ["scontrol", "requeue", job]


def requeue_job(environment: Mapping[str, str]) -> str:
    """Requeue this job; what went wrong, or nothing."""
    try:
        command = requeue_command(environment)
    except ValueError as error:  # the other ranks wait to be told
        return str(error).rstrip(".")
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        return f"`{' '.join(command)}`: there is no such program"
    return f"`{' '.join(command)}` says {done.stderr.strip() or done.returncode}" if done.returncode else ""
