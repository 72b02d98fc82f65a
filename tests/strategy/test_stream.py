"""A run that goes on from a checkpoint sees what the other would have seen next, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_longctx.testing import GlooPool, RankError
from lightning_longctx.topology import Degrees
from tests.strategy.streams import Run, seen, seen_and_after, several

Pools = Callable[[int], GlooPool]
LAST = {"max_epochs": 2}


@pytest.mark.parametrize(
    ("moment", "options"),
    [
        (("on_train_batch_end", 3), {}),
        (("on_train_batch_end", 6), {}),
        (("on_train_batch_end", 9), {"max_steps": 11, "max_epochs": -1}),
        (("on_train_batch_end", 6), {"max_steps": 11, "max_epochs": -1}),
        (("on_train_batch_end", 5), {"accumulate_grad_batches": 3}),
        (("on_validation_end", 2), {}),
        (("on_validation_end", 6), {}),
        (("on_validation_end", 6), {"max_steps": 11, "max_epochs": -1}),
        (("on_train_epoch_end", 6), {}),
        (("on_train_epoch_end", 6), {"max_steps": 11, "max_epochs": -1}),
        (("on_train_epoch_start", 6), {"max_steps": 11, "max_epochs": -1}),
        (("on_before_zero_grad", 4), {}),
    ],
)
@pytest.mark.parametrize("validates", [False, True])
def test_in_whatever_hook_it_was_saved(
    gloo: Pools, tmp_path: Path, moment: tuple[str, int], options: dict[str, Any], validates: bool
) -> None:
    """Also Lightning's numbers of epoch and batch, the ends of epochs, and the axis of loggers are the same."""
    hook, done = moment
    if hook == "on_validation_end" and not validates:
        return
    run = Run(6, validation=2 * validates, options=LAST | options | ({"val_check_interval": 2} if validates else {}))
    [(whole, hooks, rest, hooks_then)] = gloo(1).run(seen_and_after, run, moment, tmp_path / "a.ckpt", {})
    done -= done % options.get("accumulate_grad_batches", 1)
    assert rest == whole[done:]
    assert hooks_then == hooks[-len(hooks_then) :]
    ends_here = done == 6 and hook.startswith("on_train_epoch")
    assert len(hooks_then) == (3 if done <= 6 and not ends_here else 2)


@pytest.mark.parametrize(
    ("run", "steps"),
    [
        *((Run(), steps) for steps in (1, 3, 6, 8)),
        *((Run(kind="stateful lines"), steps) for steps in (3, 6, 8)),
        *((Run(kind="lines"), steps) for steps in (3, 6)),
        *((Run(kind="combined"), steps) for steps in (4, 5, 8)),
        (Run(workers=2), 3),
        (Run(workers=2, persistent=True, draws=True), 8),
        (Run(estimates=True, workers=2), 3),
        (Run(dealing=False, shuffle=True), 8),
        (Run(kind="lines", estimates=True, workers=2), 3),
    ],
)
def test_a_run_stopped_by_max_steps(gloo: Pools, tmp_path: Path, run: Run, steps: int) -> None:
    """With workers what they draw is the same too: every batch of a map-style dataset has draws of its own."""
    run = run.but(count=4 if run.kind == "combined" else 6, options=LAST)
    path = tmp_path / "a.ckpt"
    tasks = [(run, None, None), (run.but(options=LAST | {"max_steps": steps}), None, path), (run, path, None)]
    [(whole, first, rest)] = gloo(1).run(several, tasks)
    assert first + rest == whole
    assert len(first) == steps and len(whole) == 12


@pytest.mark.parametrize("kind", ["lines", "stateful lines"])
@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_validation_end"])
def test_after_the_last_batch_of_a_stream(gloo: Pools, tmp_path: Path, kind: str, hook: str) -> None:
    """Its length is known only now."""
    run = Run(6, kind=kind, validation=2, options=LAST)
    [(whole, hooks, rest, hooks_then)] = gloo(1).run(seen_and_after, run, (hook, 6), tmp_path / "a.ckpt", {})
    assert rest == whole[6:] and hooks_then == hooks


def test_other_batches_of_a_stream_are_refused(gloo: Pools, tmp_path: Path) -> None:
    path, run = tmp_path / "a.ckpt", Run(12, kind="lines", batch_size=2, options=LAST)
    gloo(1).run(seen, run.but(options=LAST | {"max_steps": 2}), None, path)
    with pytest.raises(RankError, match="batch_size=4: the checkpoint was made after 2 batches.*Use batch_size=2"):
        gloo(1).run(seen, run.but(batch_size=4), path)


def samples(every_rank: list[list[tuple[int, int, int, list[int], bool]]]) -> list[list[int]]:
    """Samples of every step over all ranks, sorted: of stand-ins none."""
    steps = zip(*every_rank, strict=True)
    return [sorted({index for *_, ids, counts in ranks if counts for index in ids}) for ranks in steps]


def world(run: Run) -> int:
    return (1 if run.degrees.data == "auto" else run.degrees.data) * run.degrees.context


@pytest.mark.parametrize(
    ("there", "then"),
    [
        (Run(batch_size=4), Run(batch_size=2, degrees=Degrees(data=2, context=2))),
        (Run(batch_size=2, degrees=Degrees(data=2, context=2)), Run(batch_size=1, degrees=Degrees(data=4))),
        (Run(batch_size=1, degrees=Degrees(data=4)), Run(batch_size=4, degrees=Degrees(context=4))),
        (Run(batch_size=2, degrees=Degrees(data=2)), Run(batch_size=1, options={"accumulate_grad_batches": 4})),
    ],
)
def test_on_other_degrees(gloo: Pools, tmp_path: Path, there: Run, then: Run) -> None:
    path, options = tmp_path / "a.ckpt", LAST
    stopped = there.but(options=options | {"max_steps": 2})
    first = gloo(world(there)).run(seen, stopped, None, path)
    rest = gloo(world(then)).run(seen, then.but(options=then.options | options), path)
    windows = 4 if then.options else 1
    whole = gloo(1).run(seen, Run(batch_size=4, options=options))
    assert samples(first) == samples(whole)[:2]
    found = samples(rest)
    if windows > 1:
        # The last window of an epoch has two of the 14 samples.
        sizes_of_windows = [4, 2, 4, 4, 4, 2]
        starts = [sum(sizes_of_windows[:number]) for number in range(6)]
        found = [sorted(sum(found[at : at + size], [])) for at, size in zip(starts, sizes_of_windows, strict=True)]
    assert found == samples(whole)[2:]
    assert len(found) == 6


@pytest.mark.parametrize(
    ("then", "message"),
    [
        (Run(batch_size=3), r"at sample 4 of its epoch.*a step takes 3 samples"),
        (Run(count=13, batch_size=2), "14 samples in the dataset, and now there are 13"),
        (Run(shuffle=False, batch_size=2), "shuffle"),
        (Run(kind="lines", batch_size=2), "max_size_cycle of \\[.dealt.\\], now max_size_cycle of \\[.stream.\\]"),
        (Run(dealing=False, batch_size=2), "now max_size_cycle of \\[.own.\\]"),
    ],
)
def test_what_cannot_be_continued_is_refused(gloo: Pools, tmp_path: Path, then: Run, message: str) -> None:
    path = tmp_path / "a.ckpt"
    gloo(1).run(seen, Run(batch_size=2, options=LAST | {"max_steps": 2}), None, path)
    with pytest.raises(RankError, match=message):
        gloo(1).run(seen, then.but(options=LAST), path)


def test_a_stream_goes_on_with_the_same_data_ranks_only(gloo: Pools, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    run = Run(12, kind="stateful lines", degrees=Degrees(data=2), options=LAST)
    whole = gloo(2).run(seen, run)
    first = gloo(2).run(seen, run.but(options=LAST | {"max_steps": 4}), None, path)
    rest = gloo(2).run(seen, run, path)
    assert [one + two for one, two in zip(first, rest, strict=True)] == whole
    with pytest.raises(RankError, match=r"data=1: the checkpoint was made with 2 data ranks.*Use data=2"):
        gloo(1).run(seen, run.but(degrees=Degrees()), path)


@pytest.mark.parametrize("then", [Run(10, batch_size=2), Run(10, kind="lines"), Run(10, kind="combined")])
def test_between_epochs_the_data_may_change(gloo: Pools, tmp_path: Path, then: Run) -> None:
    path = tmp_path / "a.ckpt"
    gloo(1).run(seen, Run(6, options={"max_epochs": 1}), None, path)
    [rest] = gloo(1).run(seen, then.but(options=LAST), path)
    assert [(epoch, number) for epoch, number, *_ in rest] == [(1, number) for number in range(len(rest))]
    assert sorted({index for *_, ids, _ in rest for index in ids}) == list(range(15 if then.kind == "combined" else 10))
