"""Where the cache is."""

from __future__ import annotations

from pathlib import Path


def root() -> Path:
    """The folder of the cache: the user's cache directory of this platform."""
    import platformdirs

    return Path(platformdirs.user_cache_dir("crossfuse", appauthor=False))
