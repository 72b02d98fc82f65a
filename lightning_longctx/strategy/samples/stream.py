"""The stream of training samples: where it is when a checkpoint is made, and how it goes on from there."""

from __future__ import annotations

import warnings
from dataclasses import asdict, replace
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_longctx import _upstream
from lightning_longctx.batch import Sharding
from lightning_longctx.strategy.samples.agreement import DataRanks
from lightning_longctx.strategy.samples.around import innermost
from lightning_longctx.strategy.samples.deal import Deal
from lightning_longctx.strategy.samples.loaders import shard_loader
from lightning_longctx.strategy.samples.progress import (
    Place,
    correct_counters,
    place_elsewhere,
    place_in_loader,
    place_of,
)
from lightning_longctx.strategy.samples.samplers import DealtSampler
from lightning_longctx.strategy.samples.streaming import StreamLoader
from lightning_longctx.strategy.samples.unfinished import restore_metrics, take_plateau_steps, unfinished


class Stream:
    """What a run has seen of its training data.

    ``state`` and ``load`` are for checkpoints; ``resume`` sets the loaders, when training starts, to where they were.
    """

    def __init__(self) -> None:
        self._trainer: Trainer | None = None
        self._ranks: DataRanks | None = None
        self._loaded: dict[str, Any] | None = None
        self._deals: bool | None = None
        self.order_seed: int | None = None

    def connect(self, trainer: Trainer, ranks: DataRanks) -> None:
        """Say whose stream it is; when a run of the trainer begins.

        Args:
            trainer: Whose loaders and counters are read.
            ranks: The data axis.
        """
        self._trainer, self._ranks = trainer, ranks
        if self._deals is None:
            self._deals = _upstream.hands_out_samplers(trainer, False)
        # Predictions are lists without repeated samples: Lightning's own sampler does that.
        _upstream.hands_out_samplers(trainer, self._deals and trainer.state.fn == TrainerFn.PREDICTING)

    def prepare(self, loader: Any, sharding: Sharding) -> Any:
        """Make a loader of any stage fit the run (see ``shard_loader``)."""
        assert self._trainer is not None and self._ranks is not None
        ranks = self._ranks if self.order_seed is None else replace(self._ranks, order_seed=self.order_seed)
        dealing = bool(self._deals) and not self._trainer.predicting
        return shard_loader(loader, sharding, ranks, training=self._trainer.training, dealing=dealing)

    def state(self) -> dict[str, Any]:
        """Plain values for a checkpoint, the same on every rank; a collective over data ranks. Empty before a fit."""
        assert self._trainer is not None and self._ranks is not None
        loaders, mode = _upstream.train_loaders(self._trainer)
        if not loaders:
            return {}
        epochs, batches = _upstream.train_counters(self._trainer)
        num_batches = self._trainer.num_training_batches
        place = place_of(epochs, batches, num_batches, self._trainer.accumulate_grad_batches)
        return {
            "place": asdict(place),
            "num_batches": _whole(num_batches),
            "logged_steps": _upstream.logged_steps(self._trainer),
            "unfinished": unfinished(self._trainer, place),
            "mode": mode,
            "loaders": [self._ranks.gather_values(_state_of(loader, place)) for loader in loaders],
        }

    def load(self, state: dict[str, Any], loops: dict[str, Any] | None = None) -> None:
        """Continue there when training starts.

        Args:
            state: From ``state``, of any degrees.
            loops: The checkpoint's ``loops`` entry: Lightning's counters, which are put right in place.
        """
        self._loaded = state or None
        if state and loops is not None:
            correct_counters(loops, Place(**state["place"]))

    def resume(self) -> None:
        """Set loaders and counters to what was loaded, if anything was; in ``on_train_start``, on every rank.

        Raises:
            ValueError: The loaders, or the samples in a step, are such that the stream cannot go on from there; the
                same on every rank.
        """
        state, self._loaded = self._loaded, None
        if state is None:
            return
        assert self._trainer is not None
        loaders, mode = _upstream.train_loaders(self._trainer)
        place = self._place_here(state, loaders, mode)
        for loader in loaders:
            if (sampler := _sampler_of(loader)) is not None:
                sampler.set_epoch(place.epoch)
        for loader, states in zip(loaders, state["loaders"], strict=place.batch > 0):
            if states[0]["kind"] == _kind_of(loader):
                self._set(loader, states, place, cycles=mode == "max_size_cycle")
        left = state["unfinished"]
        restore_metrics(self._trainer, left)
        steps = state["logged_steps"], left["validation"]
        _upstream.continue_epoch(self._trainer, place.batch, place.num_before, *steps)
        take_plateau_steps(self._trainer, left, place)
        # Lightning knows only loaders that keep their own state.
        warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch ended")

    def _place_here(self, state: dict[str, Any], loaders: list[Any], mode: str) -> Place:
        """The place in batches of this run; inside an epoch the loaders must be those of the other run."""
        assert self._trainer is not None and self._ranks is not None
        saved, accumulate = Place(**state["place"]), self._trainer.accumulate_grad_batches
        num_batches = state["num_batches"], _whole(self._trainer.num_training_batches)
        if saved.batch == 0:
            return place_elsewhere(saved, (1, num_batches[0]), (1, num_batches[1]), accumulate)
        kinds = [states[0]["kind"] for states in state["loaders"]], [_kind_of(loader) for loader in loaders]
        if kinds[0] != kinds[1] or mode != state["mode"]:
            raise ValueError(
                f"the checkpoint was made inside an epoch of other training loaders: {state['mode']} of {kinds[0]}, "
                f"now {mode} of {kinds[1]}. Use the same kinds of datasets and samplers and the same "
                "use_distributed_sampler, or resume from a checkpoint at the end of an epoch."
            )
        if "stream" in kinds[0] and len(loaders) > 1:
            raise ValueError(
                "several training loaders, of which one is a stream, cannot be continued inside an epoch. Resume from "
                "a checkpoint at the end of an epoch."
            )
        here = set()
        for loader, states in zip(loaders, state["loaders"], strict=True):
            sampler, sizes = _sampler_of(loader), (1, 1)
            if sampler is not None:
                sizes = Deal(**states[0]["deal"]).global_batch, sampler.deal.global_batch
            here.add(place_elsewhere(saved, (sizes[0], num_batches[0]), (sizes[1], num_batches[1]), accumulate))
        if len(here) > 1:
            raise ValueError(
                f"the batch sizes of the {len(loaders)} training loaders have changed by different factors since the "
                "checkpoint: no step begins at the same place in all of them. Use the same batch sizes."
            )
        return here.pop()

    def _set(self, loader: Any, states: list[dict[str, Any]], place: Place, cycles: bool) -> None:
        assert self._ranks is not None
        inside, sampler, same_ranks = place.batch > 0, _sampler_of(loader), len(states) == self._ranks.num_ranks
        mine = states[self._ranks.rank if same_ranks else 0]
        has_own_state = inside if sampler is not None else inside or mine["position"]["state"] is not None
        if mine["kind"] != "dealt" and has_own_state and not same_ranks:
            raise ValueError(
                f"data={self._ranks.num_ranks}: the checkpoint was made with {len(states)} data ranks, each with its "
                f"own place in a {type(innermost(loader)).__name__}, and how samples go to other ranks is known only "
                f"of map-style datasets that the strategy deals out. Use data={len(states)}."
            )
        if sampler is None:
            _stream_of(loader).continue_at(mine["position"])
            return
        sampler.order.load(mine["order"], inside)
        sampler.continue_at(place.epoch, place_in_loader(place.batch, sampler.deal.num_batches, cycles))
        if sampler.worker_seed is not None and mine["worker_seed"] is not None:
            sampler.worker_seed = mine["worker_seed"]
        if self.order_seed is None and sampler.kind == "dealt":
            self._keep_seed(mine["order"]["seed"])

    def _keep_seed(self, seed: int) -> None:
        assert self._ranks is not None
        self.order_seed = seed
        if seed != self._ranks.order_seed:
            rank_zero_warn(
                f"samples go on in the order of seed {seed}, with which the checkpoint was made, and not of "
                f"{self._ranks.order_seed}: otherwise some would be repeated."
            )


def _whole(num_batches: float) -> int:
    """-1 if that is not known."""
    return -1 if num_batches == float("inf") else int(num_batches)


def _kind_of(loader: Any) -> str:
    sampler = _sampler_of(loader)
    return "stream" if sampler is None else sampler.kind


def _sampler_of(loader: Any) -> DealtSampler | None:
    sampler = getattr(loader, "sampler", None)
    return sampler if isinstance(sampler, DealtSampler) else None


def _stream_of(loader: Any) -> StreamLoader:
    while not isinstance(loader, StreamLoader):
        loader = loader.loader
    return loader


def _state_of(loader: Any, place: Place) -> dict[str, Any]:
    if (sampler := _sampler_of(loader)) is None:
        return {"kind": "stream", "position": _stream_of(loader).position(place.batch)}
    order, deal = sampler.order.state(), asdict(sampler.deal)
    return {"kind": sampler.kind, "order": order, "deal": deal, "worker_seed": sampler.worker_seed}
