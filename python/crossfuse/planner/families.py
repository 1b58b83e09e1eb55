"""Names of the ways to compute a chain."""

from __future__ import annotations

#: Families of kernels that rules make, see `crossfuse.planner.kernels.every`.
FAMILIES = ("gemm", "registers", "dsm", "l2", "global")
#: Not to fuse: a library's kernels one after another, which have no tiles of ours.
EAGER = "eager"
