"""Names of the ways to compute a chain or a cascade."""

from __future__ import annotations

#: Families of kernels that rules make of chains, see `crossfuse.planner.kernels.every`.
FAMILIES = ("gemm", "registers", "dsm", "l2", "global")
#: Families of kernels of cascades: streams of threads, and streams of tiles with products; see
#: `crossfuse.planner.cascade`.
STREAM, TILES = "stream", "tiles"
CASCADE_FAMILIES = (STREAM, TILES)
#: Not to fuse: a library's kernels one after another, which have no tiles of ours.
EAGER = "eager"
