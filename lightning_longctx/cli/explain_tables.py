"""What ``explain`` prints: tables with a star at the choice, and under each why it was made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning_longctx.attention.backends import Needs
from lightning_longctx.plan.arrange import Arrangement
from lightning_longctx.plan.layouts import LayoutCount
from lightning_longctx.plan.simulate import Estimate

_TEXTS = ("layout", "schedule", "arrangement", "degrees", "device", "backend", "verdict")
"""Columns that are not numbers."""


def layout_table(rows: Sequence[LayoutCount]) -> list[str]:
    """Layouts and the reason for the chosen one, as lines."""
    cells = [
        (
            _star(row.is_chosen),
            row.layout,
            f"{row.imbalance:.3f}",
            _size(row.mean_bytes),
            _size(row.outer_bytes),
            _duration(row.seconds),
        )
        for row in rows
    ]
    heads = ("", "layout", "busiest/mean work", "received", "outer", "seconds")
    return [*_table("Layouts", heads, cells), layout_reason(rows)]


def layout_reason(rows: Sequence[LayoutCount]) -> str:
    """One sentence: by what the chosen layout beats the next best one."""
    best = next(row for row in rows if row.is_chosen)
    other = min((row for row in rows if row is not best), key=lambda row: row.seconds)
    work = f"its busiest rank has {best.imbalance:.3f} of the mean work"
    if best.mean_bytes == 0:
        return f"{best.layout}: no rank needs keys of another, and {work}."
    if other.imbalance > 1.005 * best.imbalance:
        return f"{best.layout}: {work}, {other.imbalance:.3f} with {other.layout}."
    if other.mean_bytes > best.mean_bytes:
        sizes = f"{_size(best.mean_bytes)} on average, {_size(other.mean_bytes)} with {other.layout}"
        return f"{best.layout}: the work is about as even as with {other.layout}, and less is received ({sizes})."
    if best.seconds * 1.005 > other.seconds:
        return f"{best.layout}: as fast as {other.layout}, and the plainer of the two."
    return f"{best.layout}: {_duration(best.seconds)} in all, {_duration(other.seconds)} with {other.layout}."


def schedule_table(rows: Sequence[Estimate], chosen: str, layout: str) -> list[str]:
    """Schedules on one layout; nothing for a single context rank.

    Args:
        rows: One for each schedule.
        chosen: What the engine takes by itself.
        layout: Name of the layout.
    """
    if not rows:
        return []
    cells = [(_star(row.schedule == chosen), row.schedule, *_costs(row)) for row in rows]
    heads = ("", "schedule", "sent", "outer", "compute", "seconds")
    return [*_table(f"Schedules, {layout} layout", heads, cells), schedule_reason(rows, chosen)]


def schedule_reason(rows: Sequence[Estimate], chosen: str) -> str:
    """One sentence: what the engine goes by."""
    best = next(row for row in rows if row.schedule == chosen)
    if not best.mean_bytes:
        return f"{chosen}: nothing is sent, so all are the same."
    outer = f", the busiest outer link carries {_size(best.outer_bytes)}" if best.outer_bytes else ""
    return f"{chosen}: what schedule=auto takes here; a rank sends {_size(best.mean_bytes)} on average{outer}."


def backend_table(rows: Sequence[tuple[Needs, Mapping[str, str | None]]], has_gpu: bool) -> list[str]:
    """Backends on each device, in the order that ``auto`` asks them, and what each says, as lines.

    Args:
        rows: What is asked, and why backends refuse it, as ``registry.refusals`` gives them.
        has_gpu: Whether there is one here, which GPU backends have looked at.
    """
    cells = []
    for needs, reasons in rows:
        chosen = next((name for name, reason in reasons.items() if reason is None), None)
        for name, reason in reasons.items():
            verdict = reason or ("what backend=auto takes" if name == chosen else "able")
            cells.append((_star(name == chosen), needs.device.type, name, verdict))
    asked = rows[0][0]
    options = [name for name in ("window", "softcap", "dropout") if getattr(asked, name)]
    title = ", ".join(["Backends", str(asked.dtype).removeprefix("torch."), f"heads of {asked.width}", *options])
    lines = _table(title, ("", "device", "backend", "verdict"), cells)
    if not has_gpu:
        lines.append("cuda: no GPU is here to be asked, and the packages looked for are those of this machine.")
    return lines


def arrangement_table(rows: Sequence[Arrangement]) -> list[str]:
    """Arrangements, the reason for the chosen one, and why others do not fit, as lines."""
    cells = []
    for row in rows:
        degrees = row.degrees
        options = f"context={degrees.context} inner_ring={degrees.inner} head={degrees.head}"
        if degrees.placement != "head_first":
            options += f" placement={degrees.placement}"
        costs = _costs(row.estimate) if row.estimate else ("-", "-", "-", "does not fit")
        cells.append((_star(row.is_chosen), row.name, options, *costs))
    best = next(row for row in rows if row.is_chosen)
    refusals = [f"{row.name}: {row.refusal}" for row in rows if row.refusal]
    heads = ("", "arrangement", "degrees", "sent", "outer", "compute", "seconds")
    return [*_table("Arrangements", heads, cells), arrangement_reason(best, rows), *refusals]


def arrangement_reason(best: Arrangement, rows: Sequence[Arrangement]) -> str:
    """One sentence: by what the chosen arrangement beats the next best one."""
    others = [row for row in rows if row.estimate and row is not best]
    assert best.estimate is not None
    if not others:
        return f"{best.name}: the only one that fits."
    other = min(others, key=lambda row: row.estimate.seconds)  # type: ignore[union-attr]
    assert other.estimate is not None
    # Rounding may leave a little less than nothing.
    waits = [
        _duration(max(0.0, round(row.seconds - row.compute_seconds, 9))) for row in (best.estimate, other.estimate)
    ]
    return f"{best.name}: {waits[0]} of its time are no work but waiting, {waits[1]} with {other.name}."


def _costs(row: Estimate) -> tuple[str, str, str, str]:
    sizes = (_size(row.mean_bytes), _size(row.outer_bytes))
    return (*sizes, _duration(row.compute_seconds), _duration(row.seconds))


def _table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    texts = sum(not head or head in _TEXTS for head in heads)
    lines = []
    for row in (heads, *rows):
        cells = zip(row, widths, strict=True)
        lines.append("  ".join(f"{c:<{w}}" if i < texts else f"{c:>{w}}" for i, (c, w) in enumerate(cells)).rstrip())
    return [title, *lines]


def _star(is_chosen: bool) -> str:
    return "*" if is_chosen else " "


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB" if num_bytes else "-"


def _duration(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
