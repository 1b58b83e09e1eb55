"""Default bins of row counts, apart from the code that builds them, which needs TVM."""

from __future__ import annotations

#: Rows of the bins unless the caller names others: a decode step, then powers of two that each fill
#: tiles of 64, 128 and 256 rows.
BINS = (16, 64, 128, 256, 512)
