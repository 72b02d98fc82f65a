"""What one rank of a pool does: join the gloo world, run calls, leave the process as it was."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import pickle
import random
import signal
import sys
import traceback
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from lightning_longctx.testing.messages import Call, Reply, World
from lightning_longctx.testing.poison import poisoned_empty

STACK_SIGNAL = signal.SIGUSR2
"""Makes a rank write the stacks of its threads to its log (Lightning uses SIGUSR1 and SIGTERM)."""


def serve(world: World, rank: int, connection: Connection, parent: int) -> None:
    """Answer calls from ``connection`` until it closes. The first reply says that the process group stands."""
    _detach(world.logs[rank], parent)
    os.environ.update(world.environment(rank))
    _join(world, rank)
    environment, directory, group = dict(os.environ), os.getcwd(), dist.group.WORLD
    with ExitStack() as stack:
        if world.poison_empty:
            stack.enter_context(poisoned_empty())
        reply = Reply()
        while True:
            try:
                connection.send_bytes(pickle.dumps(reply))
                call = pickle.loads(connection.recv_bytes())
            except (EOFError, ConnectionError):
                return
            reply = _answer(call)
            _restore(environment, directory)
            intact = dist.is_initialized() and dist.group.WORLD is group
            reply = replace(reply, intact=intact, num_handles=_num_handles())


def _detach(log: str, parent: int) -> None:
    """Lead a process group, write to the log, die with the parent."""
    os.setsid()
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for target in (1, 2):
        os.dup2(descriptor, target)
    os.close(descriptor)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # the last words of a rank that dies count
    faulthandler.enable()
    faulthandler.register(STACK_SIGNAL, all_threads=True)


def _join(world: World, rank: int) -> None:
    from lightning.pytorch.utilities import rank_zero_only

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", world.store_port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world.num_ranks)
    # Lightning reads the rank when it is imported, which was before the fork.
    rank_zero_only.rank = rank


def _answer(call: Call) -> Reply:
    """Run one call. Whatever it raises is the answer, SystemExit of a command line included."""
    try:
        os.chdir(call.directory)
        # The same numbers whichever calls ran before.
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        fn, args, kwargs = call.unpack()
        value = fn(*args, **kwargs)
        # Plain pickle copies a tensor's bytes; torch.multiprocessing's would share memory with a process that may die.
        return Reply(payload=pickle.dumps(value))
    except BaseException as error:
        return Reply(error=traceback.format_exc(), summary=f"{type(error).__name__}: {error}")


def _restore(environment: dict[str, str], directory: str) -> None:
    """Undo what Lightning and tests leave behind in a process."""
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]  # PL_GLOBAL_SEED would seed the next Trainer
    os.environ.update(environment)  # LightningEnvironment.teardown deletes WORLD_SIZE
    os.chdir(directory)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(1)
    gc.collect()  # a Trainer is a cycle that holds DataLoader workers and process groups
    sys.stdout.flush()
    sys.stderr.flush()


def _num_handles() -> int:
    counted = [Path("/proc/self/fd"), Path("/proc/self/task")]
    return sum(len(os.listdir(path)) for path in counted if path.exists())
