"""Families of kernels that compute a chain or a cascade, a file each.

`crossfuse.planner.families.registry` lists them; here are the names that other code asks for.
"""

from __future__ import annotations

#: Streams of threads, streams of tiles with products, and rows that a product's own kernel, or that
#: of a chain of products, makes before it loads them.
STREAM, TILES, ROWS, ROWS_CHAIN = "stream", "tiles", "rows", "rows_chain"
#: Streams of warps, of few rows with products.
WARPS = "warps"
#: A stream of tiles, and the product of what it makes, in one kernel.
ATTENTION_OUT = "attention_out"
#: A stream of threads whose rows are added up, and a kernel that adds the sums of CTAs.
ROW_SUMS = "row_sums"
#: Not to fuse: a library's kernels one after another, which have no tiles of ours.
EAGER = "eager"
