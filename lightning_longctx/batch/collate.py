"""The seam to data loaders: ``ShardCollate`` around any ``collate_fn``, and its stand-in for other iterables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lightning_longctx.batch.shard import shard_batch
from lightning_longctx.batch.sharding import Sharding
from lightning_longctx.sequence.record import SequenceRecord


@dataclass(frozen=True)
class ShardCollate:
    """A ``collate_fn`` that builds the full batch with the loader's own one, then keeps this rank's part.

    Picklable whenever ``collate_fn`` is, so it runs in forked and spawned workers, and only shards leave them.

    Args:
        collate_fn: Turns samples into a full batch (see ``batch.shard.shard_batch`` for its entries).
        sharding: How the batch is cut.
    """

    collate_fn: Callable[[Any], Any]
    sharding: Sharding

    def __call__(self, samples: Any) -> Any:
        """The part of the collated batch that this rank holds."""
        return shard_batch(self.collate_fn(samples), self.sharding)


def ensure_sharded(batch: Any, sharding: Sharding) -> Any:
    """Cut batches that no ``ShardCollate`` has seen; those it has are checked and returned as they are.

    Walks through the lists, tuples and dicts of batches that a ``CombinedLoader`` makes (``None`` for an exhausted
    member).

    Raises:
        ValueError: A batch cannot be cut (see ``shard_batch``), or was cut for other degrees or another layout.
    """
    if batch is None:
        return None
    if isinstance(batch, Mapping) and "sequence" in batch:
        return _checked(batch, sharding)
    if isinstance(batch, (list, tuple)) and _all_batches(batch):
        members = [ensure_sharded(member, sharding) for member in batch]
        return members if isinstance(batch, list) else _rebuilt(batch, members)
    if isinstance(batch, Mapping) and _all_batches(batch.values()):
        return {key: ensure_sharded(member, sharding) for key, member in batch.items()}
    return shard_batch(batch, sharding)


def _all_batches(members: Any) -> bool:
    found = [member for member in members if member is not None]
    return bool(found) and all(isinstance(member, (Mapping, list, tuple)) for member in found)


def _rebuilt(batch: tuple[Any, ...], members: list[Any]) -> tuple[Any, ...]:
    return type(batch)(*members) if hasattr(batch, "_fields") else tuple(members)


def _checked(batch: Mapping[str, Any], sharding: Sharding) -> Mapping[str, Any]:
    record = batch["sequence"]
    if not isinstance(record, SequenceRecord):
        raise ValueError(
            f"the batch entry `sequence` holds a {type(record).__name__}; the name is taken by the record of how the "
            "batch is cut. Rename your entry."
        )
    found = (record.checksum, record.documents, record.num_rows, record.padded, record.row_lengths)
    # The choice of `auto` costs too much to make it again here.
    chosen = replace(sharding, layout=record.layout) if sharding.layout == "auto" else sharding
    if chosen.record(record.length, record.num_valid_tokens, *found) != record:
        raise ValueError(
            f"a batch was cut as {record}, which does not fit this run's {sharding}: its loader's workers were started "
            "by another run. Build a new loader."
        )
    return batch
