"""``python -m crossfuse`` is the ``crossfuse`` command."""

from __future__ import annotations

from crossfuse.cli import main

if __name__ == "__main__":
    main()
