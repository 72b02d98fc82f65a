"""Which peers take part: installed, able, and right."""

from __future__ import annotations

from importlib.util import find_spec

from lightning_longctx.cli.bench.attention_case import AttentionCase
from lightning_longctx.cli.bench.gate import WrongResultError, refuse_wrong
from lightning_longctx.cli.bench.measure import Worker
from lightning_longctx.cli.bench.peers import (
    deepspeed_ulysses,
    ring_flash_attn,
    torch_context_parallel,
    yunchang_usp,
)
from lightning_longctx.cli.bench.peers.peer import Peer
from lightning_longctx.cli.bench.progress import stages
from lightning_longctx.cli.bench.ranks import RankFailedError, Ranks

PEERS: tuple[Peer, ...] = (
    *ring_flash_attn.PEERS,
    *deepspeed_ulysses.PEERS,
    *yunchang_usp.PEERS,
    *torch_context_parallel.PEERS,
)
"""All that are known here."""


def admitted_peers(case: AttentionCase, peers: tuple[Peer, ...] = PEERS) -> tuple[tuple[Peer, ...], dict[str, str]]:
    """Try every peer at a small size, in processes of its own: what it does wrong must not hold up the others.

    Args:
        case: What is to be timed.
        peers: To choose from.

    Returns:
        Those that can be timed; and for the others, by name, why not.
    """
    reasons: dict[str, str] = {}
    with stages(len(peers)) as advance:
        for peer in peers:
            advance(f"trying {peer.name}")
            reason = absence(peer) or peer.refusal(case) or _failure(peer, case)
            if reason is not None:
                reasons[peer.name] = reason
    return tuple(peer for peer in peers if peer.name not in reasons), reasons


def absence(peer: Peer) -> str | None:
    """Why a peer is not here; None if it is."""
    return None if find_spec(peer.package) else f"not installed: {peer.install}"


def _failure(peer: Peer, case: AttentionCase) -> str | None:
    small = case.small()
    try:
        with Ranks(case.ranks, Worker) as ranks:
            refuse_wrong(peer.name, ranks.call("check", peer, small), small)
    except WrongResultError as wrong:
        return f"wrong: {wrong}"
    except RankFailedError as failed:
        return f"fails: {str(failed).strip().splitlines()[-1]}"
    return None
