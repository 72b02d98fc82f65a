"""How the processes of a machine share its cores."""

from __future__ import annotations

import os

import torch


def share_cores(num_processes: int) -> None:
    """Give each process of this machine its share of the cores, unless ``OMP_NUM_THREADS`` says otherwise.

    torch takes one thread per core in every process. Lightning's launcher corrects that in the first process only,
    after it has started the others; set before, the environment reaches them all.
    """
    if "OMP_NUM_THREADS" in os.environ:
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    num_threads = max(1, cores // num_processes)
    os.environ["OMP_NUM_THREADS"] = str(num_threads)
    torch.set_num_threads(num_threads)
