"""A rank that lives but stays away: the others wait no longer than the timeout, and say on which axis and for whom."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import cast

import pytest
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader

from lightning_longctx import CausalLM, Communication, Degrees, LongContextStrategy
from lightning_longctx.attention.peer_errors import PeerError
from lightning_longctx.strategy.failure.waiting import Wait, find_wait
from lightning_longctx.testing import GlooPool, RankError
from tests.cases.tiny import QUIET, samples, tiny_module

Pools = Callable[[int], GlooPool]
TIMEOUT = 3.0
AWAY = 1


class StaysAway(Callback):
    """Sleeps on one rank: before a ``step``, the second block's ``forward``, or the first one's ``backward``."""

    def __init__(self, where: str, seconds: float) -> None:
        self.where, self.seconds = where, seconds

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        first, second = cast("CausalLM", module).decoder.blocks
        if trainer.global_rank == AWAY and self.where == "forward":
            second.register_forward_pre_hook(self.sleep)
        if trainer.global_rank == AWAY and self.where == "backward":
            first.register_full_backward_pre_hook(self.sleep)

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: object, batch_idx: int) -> None:
        if trainer.global_rank == AWAY and self.where == "step" and batch_idx == 1:
            self.sleep()

    def sleep(self, *_: object) -> None:
        time.sleep(self.seconds)


def wait_in_vain(where: str, degrees: Degrees, shared_memory: bool, sharding: str, folder: Path) -> None:
    strategy = LongContextStrategy(
        degrees,
        communication=Communication(shared_memory=shared_memory),
        sharding=sharding,  # type: ignore[arg-type]
        timeout=timedelta(seconds=TIMEOUT),
    )
    world, away = dist.get_world_size(), StaysAway(where, TIMEOUT + 4)
    trainer = Trainer(strategy=strategy, devices=world, max_epochs=1, callbacks=[away], **QUIET)
    begun = time.monotonic()
    try:
        trainer.fit(tiny_module(), DataLoader(samples(4)))  # type: ignore[arg-type]
    except RuntimeError as error:
        assert time.monotonic() < begun + 6 * TIMEOUT
        (folder / str(dist.get_rank())).write_text("".join(traceback.format_exception_only(error)))
        raise RuntimeError("this world is spent: no call is to follow in it") from error


INNER = "for rank 1 on the inner ring of the context axis, for keys and values."
ABSENT = "rank 1 did not come there within the timeout"
CASES = [
    pytest.param("forward", Degrees(context=2), True, "replicate", [INNER, "(in forward of attention)"], id="memory"),
    pytest.param("forward", Degrees(context=2), False, "replicate", [INNER, "(in forward of attention)"], id="gloo"),
    pytest.param("forward", Degrees(head=2), True, "replicate", ["for rank 1 on the head axis"], id="heads"),
    pytest.param("forward", Degrees(data=2), True, "fsdp", ["with ranks 0, 1", ABSENT], id="fsdp"),
    pytest.param(
        "backward", Degrees(context=2), True, "replicate", ["for rank 1 on", "(in backward of attention)"],
        id="backward", marks=pytest.mark.exhaustive,
    ),
    pytest.param(
        "step", Degrees(context=2), True, "replicate", ["in all_gather, with ranks 0, 1", ABSENT],
        id="step", marks=pytest.mark.exhaustive,
    ),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("where", "degrees", "shared_memory", "sharding", "words"), CASES)
def test_who_waited_where_for_whom(
    gloo: Pools, tmp_path: Path, where: str, degrees: Degrees, shared_memory: bool, sharding: str, words: list[str]
) -> None:
    with pytest.raises(RankError):
        gloo(2).run(wait_in_vain, where, degrees, shared_memory, sharding, tmp_path)
    told = (tmp_path / "0").read_text()
    assert "timed out waiting" in told.lower() and "(on rank 0 of 2)" in told, told
    assert all(some in told for some in words), told


def places_of_waits() -> list[Wait | None]:
    def all_reduce(group: dist.ProcessGroup | None) -> None:
        raise RuntimeError(f"Timed out waiting 2000ms for recv operation to complete {group is None}")

    found = []
    for description in ("mesh_data", "loss", "heads of (0,)"):
        group = dist.new_group([0], group_desc=description)
        try:
            all_reduce(group)  # type: ignore[arg-type]
        except RuntimeError as error:
            found.append(find_wait(error))
        dist.destroy_process_group(group)  # type: ignore[arg-type]
    return [*found, find_wait(ValueError("raised nowhere")), find_wait(PeerError("late", "some axis", 3, 1.0))]


def test_place_of_a_wait(gloo: Pools) -> None:
    assert gloo(1).run(places_of_waits) == [
        [
            Wait("the data axis, in all_reduce", (0,)),
            Wait("the loss axis, in all_reduce", (0,)),
            Wait("the head axis, for the exchange of tokens and heads, in all_reduce", (0,)),
            None,
            Wait("some axis", (0, 3)),
        ]
    ]
