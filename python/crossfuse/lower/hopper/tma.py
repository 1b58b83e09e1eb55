"""Names of the instructions that copy boxes of tensors (PTX ISA, cp.async.bulk.tensor)."""

from __future__ import annotations


def load_name(rank: int) -> str:
    """A load of a box to shared memory, by a tensor map of so many dimensions."""
    return f"cp.async.bulk.tensor.{rank}d.shared::cluster.global.mbarrier::complete_tx::bytes"


def store_name(rank: int) -> str:
    """A store of a box from shared memory."""
    return f"cp.async.bulk.tensor.{rank}d.global.shared::cta.tile.bulk_group"
