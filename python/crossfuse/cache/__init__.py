"""The compilation cache on disk: results of earlier runs, keyed by their content.

One folder holds it all: cubins, kernel libraries, plans, schedules, rewritten models and the
emulator's executables. Nothing in here needs TVM or torch.
"""

from __future__ import annotations

from crossfuse.cache.shelf import Entry, Shelf, shelf
from crossfuse.cache.upkeep import Kept, clear, kept, limit_bytes, prune, root

__all__ = ["Entry", "Kept", "Shelf", "clear", "kept", "limit_bytes", "prune", "root", "shelf"]
