"""``lightning-longctx explain``: what the automatic choices are made from, as tables."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jsonargparse import ArgumentParser, DefaultHelpFormatter

from lightning_longctx.attention.backends import Needs
from lightning_longctx.attention.backends.registry import PREFERENCE, refusals
from lightning_longctx.cli.bench.masks import document_lengths, parse_mask
from lightning_longctx.cli.explain_tables import arrangement_table, backend_table, layout_table, schedule_table
from lightning_longctx.plan.arrange import explain_arrangements
from lightning_longctx.plan.communication import SCHEDULES, Communication
from lightning_longctx.plan.layouts import explain_layouts
from lightning_longctx.plan.mask import Mask
from lightning_longctx.plan.shape import AttentionShape
from lightning_longctx.plan.simulate import estimate_attention
from lightning_longctx.sequence.documents import Documents
from lightning_longctx.sequence.layout import LayoutName
from lightning_longctx.sequence.record import SequenceRecord
from lightning_longctx.topology.degrees import divisors
from lightning_longctx.topology.links import Links

ITEM_SIZES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}

EXAMPLES = """
  lightning-longctx explain --tokens 131072 --ranks 16 --inner_ring 8
  lightning-longctx explain --tokens 65536 --documents 1024           packed documents
  lightning-longctx explain --mask window:4096 --links.outer_gbits 25
  lightning-longctx explain --dtype float32 --softcap true            which backend computes that, and why
"""


@dataclass(frozen=True)
class Explain:
    """Count what attention computes and sends, layout by layout, and show what would be chosen.

    Nothing runs: no process is started, no GPU is needed. Four tables: the layouts of the sequence, the schedules that
    move keys and values over the chosen one, the backends that compute it on a GPU and on a CPU, and the ways to
    arrange all ranks of the cluster in rings and head groups. Each marks its choice with a star. Times are of one
    attention call, forward and backward, from simple models of the machine: trust their order, not their digits.

    Args:
        tokens: Length of the sequence.
        ranks: Ranks that share it.
        inner_ring: Those of them on one node; must divide ranks. null is all.
        mask: Who may see whom: causal, full or window:W (causal, the latest W keys).
        documents: Mean length of packed documents, whose lengths are exponential (always the same ones). null packs
            nothing.
        heads: Query heads.
        kv_heads: Key/value heads; must divide heads. null is as many as heads.
        width: Width of one head.
        dtype: Of queries, keys and values.
        softcap: Whether attention caps its scores; only the backends ask.
        dropout: Whether attention drops weights; only the backends ask.
        keep_kv: Keep keys and values of other nodes until backward instead of sending them again.
        links: Speeds of the cluster.

    Raises:
        ValueError: An option does not fit the others; the message names it.
    """

    tokens: int = 65536
    ranks: int = 8
    inner_ring: int | None = None
    mask: str = "causal"
    documents: int | None = None
    heads: int = 32
    kv_heads: int | None = None
    width: int = 128
    dtype: Literal["bfloat16", "float16", "float32", "float64"] = "bfloat16"
    softcap: bool = False
    dropout: bool = False
    keep_kv: bool = False
    links: Links = Links()

    def __post_init__(self) -> None:
        for name in ("tokens", "ranks", "inner_ring", "documents", "heads", "kv_heads", "width"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1.")
        if self.ranks % self.inner:
            allowed = " or ".join(map(str, divisors(self.ranks)))
            raise ValueError(
                f"inner_ring={self.inner_ring} does not divide ranks={self.ranks}. Use inner_ring={allowed}."
            )
        if self.heads % self.shape.kv_heads:
            allowed = " or ".join(map(str, divisors(self.heads)))
            raise ValueError(f"kv_heads={self.kv_heads} does not divide heads={self.heads}. Use kv_heads={allowed}.")
        if self.tokens < 2 * self.ranks:
            raise ValueError(f"tokens={self.tokens} are too few for ranks={self.ranks}: use {2 * self.ranks} or more.")
        if (parsed := parse_mask(self.mask)).kind == "documents":
            raise ValueError(f"mask={self.mask}: use mask=causal and documents={parsed.tokens} instead.")

    @property
    def inner(self) -> int:
        """Ranks on one node."""
        return self.ranks if self.inner_ring is None else self.inner_ring

    @property
    def shape(self) -> AttentionShape:
        """Heads and sizes."""
        size = ITEM_SIZES[self.dtype]
        return AttentionShape(self.heads, self.kv_heads or self.heads, self.width, size, max(4, size))

    @property
    def position_mask(self) -> Mask:
        """``mask``, parsed."""
        return parse_mask(self.mask).mask

    @property
    def needs(self) -> tuple[Needs, ...]:
        """What a backend must compute, on every device type that has some."""
        options = (self.width, self.position_mask.window is not None, self.softcap, self.dropout)
        return tuple(
            Needs(torch.device(device), getattr(torch, self.dtype), *options) for device in reversed(PREFERENCE)
        )

    def packed(self) -> Documents:
        """Cumulative lengths of the documents; empty if nothing is packed."""
        if self.documents is None:
            return ()
        lengths, ends = document_lengths(self.tokens, self.documents), [0]
        for length in lengths:
            ends.append(ends[-1] + length)
        return tuple(ends)

    def text(self) -> str:
        """The four tables, each with its reason."""
        documents, mask, shape = self.packed(), self.position_mask, self.shape
        layouts = explain_layouts(
            self.tokens, self.ranks, self.inner, documents, masks=(mask,), links=self.links, shape=shape
        )
        layout: LayoutName = next(row.layout for row in layouts if row.is_chosen)
        record = SequenceRecord(self.tokens, layout, self.ranks, self.inner, documents=documents)
        ways = Communication(keep_kv=self.keep_kv, links=self.links)
        schedules = [
            estimate_attention(record, shape, mask, replace(ways, schedule=name))
            for name in (SCHEDULES if self.ranks > 1 else ())
        ]
        chosen = estimate_attention(record, shape, mask, ways).schedule
        nodes = self.ranks // self.inner
        arrangements = explain_arrangements(nodes, self.inner, self.tokens, shape, mask, ways, layout, documents)
        tables = (
            layout_table(layouts),
            schedule_table(schedules, chosen, layout),
            backend_table([(needs, refusals(needs)) for needs in self.needs], torch.cuda.is_available()),
            arrangement_table(arrangements),
        )
        return "\n\n".join("\n".join(lines) for lines in tables if lines)


class _Formatter(argparse.RawDescriptionHelpFormatter, DefaultHelpFormatter):
    """Keeps the lines of the description."""


def main(argv: Sequence[str]) -> None:
    """``lightning-longctx explain [options]``.

    Raises:
        SystemExit: With code 2 if an option is wrong, after one message on stderr that names it.
    """
    summary, _, _ = inspect.cleandoc(Explain.__doc__ or "").partition("\n\nArgs:")
    prog = "lightning-longctx explain"
    parser = ArgumentParser(
        prog=prog,
        usage=f"{prog} [options]",
        description=summary + "\n" + EXAMPLES,
        formatter_class=_Formatter,
        allow_abbrev=False,
    )
    parser.add_class_arguments(Explain)
    options = parser.parse_args(list(argv)).as_dict()
    try:
        explain = Explain(**{**options, "links": Links(**options["links"])})
    except ValueError as problem:
        parser.error(str(problem))
    print(explain.text())
