"""Where the cache is."""

from __future__ import annotations

from pathlib import Path


def root() -> Path:
    """The cache's folder, in the platform's cache directory of the user."""
    import platformdirs

    return Path(platformdirs.user_cache_dir("crossfuse", appauthor=False))
