"""Names of the families of kernels that compute a chain or a cascade."""

from __future__ import annotations

#: Families of kernels that rules make of chains, see `crossfuse.planner.kernels.every`.
FAMILIES = ("gemm", "registers", "dsm", "l2", "global")
#: Families of kernels of cascades: streams of threads, streams of tiles with products, and rows
#: that a product's own kernel makes before it loads them; see `crossfuse.planner.cascade`.
STREAM, TILES, ROWS = "stream", "tiles", "rows"
CASCADE_FAMILIES = (STREAM, TILES, ROWS)
#: Where the states of a cascade are, as `crossfuse.compile` names it: one CTA makes them; those of
#: a cluster merge; a second kernel merges them.
STATE_PLACES = ("registers", "dsm", "global")
#: Not to fuse: a library's kernels one after another, which have no tiles of ours.
EAGER = "eager"
