"""The error texts of the project, read from its sources without running them."""

from __future__ import annotations

from refusals.entries import Entry
from refusals.find import find_entries
from refusals.page import write_page

__all__ = ["Entry", "find_entries", "write_page"]
