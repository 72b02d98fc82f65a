"""Lightning's counters, read and put right; in runs: ``test_stream``."""

from types import SimpleNamespace
from typing import Any

import pytest

from lightning_longctx.strategy.samples.progress import (
    Place,
    correct_counters,
    place_elsewhere,
    place_in_loader,
    place_of,
)


def tracker(ready: int, started: int, processed: int, completed: int) -> Any:
    return SimpleNamespace(ready=ready, started=started, processed=processed, completed=completed)


def place(epochs: tuple, batches: tuple, before: int = 20, last: bool = False, accumulate: int = 1) -> Place:
    total = tracker(*(count + before for count in batches))
    progress = SimpleNamespace(current=tracker(*batches), total=total, is_last_batch=last)
    return place_of(SimpleNamespace(current=tracker(*epochs)), progress, 10, accumulate)


IN, STOPPED = (3, 3, 2, 2), (3, 3, 3, 3)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (place(IN, (4, 4, 4, 3)), Place(2, 4, 20)),  # in on_train_batch_end
        (place(IN, (5, 5, 4, 4)), Place(2, 4, 20)),  # a batch that raised
        (place(IN, (10, 10, 9, 9), last=True), Place(2, 9, 20)),  # the last one did
        (place(IN, (10, 10, 10, 10), last=True), Place(2, 10, 20, ended=True)),  # in the validation at the end
        (place(IN, (6, 6, 6, 6), last=True), Place(2, 6, 20, ended=True)),  # a stream that ended
        (place(STOPPED, (4, 4, 4, 4)), Place(2, 4, 20)),  # max_steps
        (place((3, 3, 3, 2), (10, 10, 10, 10), last=True), Place(3, 0, 30)),  # in on_train_epoch_end
        (place((4, 3, 3, 3), (10, 10, 10, 10), last=True), Place(3, 0, 30)),  # in on_train_epoch_start
        (place((0, 0, 0, 0), (0, 0, 0, 0), before=0), Place(0, 0, 0)),
        (place(IN, (7, 7, 7, 6), accumulate=3), Place(2, 6, 20)),  # a window without its step
        (place(IN, (10, 10, 10, 9), accumulate=3, last=True), Place(2, 10, 20, ended=True)),
    ],
)
def test_places(found: Place, expected: Place) -> None:
    assert found == expected


@pytest.mark.parametrize("at", [Place(2, 4, 20), Place(3, 0, 30), Place(2, 10, 20, ended=True)])
def test_counters_say_the_place(at: Place) -> None:
    names = ("ready", "started", "processed", "completed")
    counters = {which: dict.fromkeys(names, 99) for which in ("total", "current")}
    loops: Any = {"fit_loop": {"epoch_progress": counters, "state_dict": {"combined_loader": [1]}}}
    loops["fit_loop"]["epoch_loop.batch_progress"] = {
        **{which: dict.fromkeys(names, 99) for which in ("total", "current")},
        "is_last_batch": not at.ended,
    }
    correct_counters(loops, at)
    fit_loop = loops["fit_loop"]
    epochs, batches = (
        SimpleNamespace(**{which: tracker(*(saved[which][name] for name in names)) for which in ("total", "current")})
        for saved in (fit_loop["epoch_progress"], fit_loop["epoch_loop.batch_progress"])
    )
    batches.is_last_batch = fit_loop["epoch_loop.batch_progress"]["is_last_batch"]
    assert batches.total.completed == at.num_before + at.batch
    assert fit_loop["state_dict"] == {}
    if at.batch:
        assert place_of(epochs, batches, 10, 1) == at
    else:
        assert epochs.current == epochs.total == tracker(3, 3, 3, 3)


def test_a_place_in_batches_of_another_size() -> None:
    assert place_elsewhere(Place(1, 6, 10), (4, 10), (4, 10), 1) == Place(1, 6, 10)
    assert place_elsewhere(Place(1, 6, 10), (4, 10), (8, 5), 3) == Place(1, 3, 5)
    assert place_elsewhere(Place(1, 6, 10), (4, 10), (2, 20), 4) == Place(1, 12, 20)
    assert place_elsewhere(Place(1, 10, 10, True), (4, 10), (7, 6), 5) == Place(1, 6, 6, True)
    assert place_elsewhere(Place(1, 10, 10, True), (1, -1), (1, -1), 1) == Place(1, 10, 10, True)
    assert place_elsewhere(Place(2, 0, 20), (4, 10), (7, 6), 5) == Place(2, 0, 12)
    with pytest.raises(ValueError, match=r"at sample 12 of its epoch.*a step takes 8 samples.*divides 12"):
        place_elsewhere(Place(0, 3, 0), (4, 10), (8, 5), 1)
    with pytest.raises(ValueError, match=r"8 x accumulate_grad_batches=2 samples"):
        place_elsewhere(Place(0, 2, 0), (4, 10), (8, 5), 2)


def test_places_in_loaders_that_end_at_different_times() -> None:
    assert [place_in_loader(batch, 3, cycles=True) for batch in (0, 2, 3, 4, 6, 7)] == [0, 2, 3, 1, 3, 1]
    assert [place_in_loader(batch, 3, cycles=False) for batch in (0, 3, 7)] == [0, 3, 3]
