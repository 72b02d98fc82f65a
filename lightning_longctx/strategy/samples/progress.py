"""Where training is inside an epoch, and Lightning's counters of it put right. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Place:
    """How much of the training data is in the weights.

    Args:
        epoch: Current epoch, from 0.
        batch: Its batches that are done; 0 if it has not begun.
        num_before: Batches of all epochs before it.
        ended: Whether those were all batches of the epoch, and only its end is left to do.
    """

    epoch: int
    batch: int
    num_before: int
    ended: bool = False


def place_of(epochs: Any, batches: Any, num_batches: float, accumulate: int) -> Place:
    """Read Lightning's counters at the time of a checkpoint.

    A window of micro-batches that has not come to its step does not count: its gradients are not in a checkpoint.

    Args:
        epochs: Lightning's progress of epochs.
        batches: Of batches.
        num_batches: Batches of an epoch, infinite if that is not known.
        accumulate: Micro-batches of a window.
    """
    done, current = batches.current.processed, epochs.current
    before = batches.total.processed - done
    ended = done >= num_batches or (batches.is_last_batch and batches.current.ready == done)
    if current.started > current.processed:
        epoch = current.processed
    elif current.ready > current.started or current.processed == 0 or ended:
        return Place(current.processed, 0, batches.total.processed)  # between two epochs
    else:
        epoch = current.processed - 1  # training stopped inside an epoch, which Lightning counts as one
    return Place(epoch, done if ended else done - done % accumulate, before, ended)


def correct_counters(loops: dict[str, Any], place: Place) -> None:
    """Let the counters of a checkpoint say what ``place`` says, in place.

    Lightning's own differ with the hook in which the checkpoint was made: an epoch that ``max_steps`` has cut short is
    counted, a batch that raised is begun, one that has just ended is not complete.

    Args:
        loops: The checkpoint's ``loops`` entry.
        place: Of the same checkpoint.
    """
    fit_loop = loops["fit_loop"]
    inside = place.batch > 0
    for tracker in ("total", "current"):
        counters = fit_loop["epoch_progress"][tracker]
        counters["ready"] = counters["started"] = place.epoch + inside
        counters["processed"] = counters["completed"] = place.epoch
    progress = fit_loop["epoch_loop.batch_progress"]
    progress["is_last_batch"] = place.ended
    for tracker, count in (("total", place.num_before + place.batch), ("current", place.batch)):
        progress[tracker].update(dict.fromkeys(("ready", "started", "processed", "completed"), count))
    # Loaders are continued by the strategy, on every rank from its own state; this is the state of rank 0.
    fit_loop.get("state_dict", {}).pop("combined_loader", None)


def place_elsewhere(place: Place, saved: tuple[int, int], now: tuple[int, int], accumulate: int) -> Place:
    """The same place in batches of another size.

    Args:
        place: As saved.
        saved: Global batch in samples, and batches of an epoch (-1 if not known), of the run that saved.
        now: The same of this run.
        accumulate: Micro-batches of a window in this run.

    Raises:
        ValueError: No batch, or no window of batches, begins there.
    """
    if place.batch == 0:
        return Place(place.epoch, 0, _before(place, saved[1], now[1]))
    if place.ended:
        number = now[1] if now[1] > 0 else place.batch  # a stream's length is not known
        return Place(place.epoch, number, _before(place, saved[1], now[1]), ended=True)
    position = place.batch * saved[0]
    number, rest = divmod(position, now[0])
    if rest or number % accumulate:
        window = f" x accumulate_grad_batches={accumulate}" if accumulate > 1 else ""
        raise ValueError(
            f"the checkpoint is at sample {position} of its epoch, and no step of this run begins there: a step takes "
            f"{now[0]}{window} samples (batch_size x data ranks{' x accumulation' if window else ''}), and took "
            f"{saved[0]} a batch then. Choose batch_size, data and accumulate_grad_batches so that their product "
            f"divides {position}, or resume from a checkpoint at the end of an epoch."
        )
    return Place(place.epoch, number, _before(place, saved[1], now[1]))


def _before(place: Place, num_batches: int, now: int) -> int:
    known = num_batches > 0 and now > 0
    return place.num_before * now // num_batches if known else place.num_before


def place_in_loader(batch: int, num_batches: int, cycles: bool) -> int:
    """How many batches of its current round a loader has given after ``batch`` batches of a combined loader.

    Args:
        batch: Batches of the combined loader.
        num_batches: Of this one, in a round.
        cycles: Whether it begins again when it has ended.
    """
    if batch <= num_batches or not cycles:
        return min(batch, num_batches)
    return batch % num_batches or num_batches
