"""What this machine offers, and what to install where something is missing."""

from __future__ import annotations

import crossfuse
from crossfuse.doctor import checks
from crossfuse.doctor.checks import Check, Report

__all__ = ["Check", "Report", "collect"]


def collect() -> Report:
    """Look at this machine; nothing is installed, written or imported that is heavy.

    Returns
    -------
    Report
        One check each for Python, the platform, every pinned package, the C++ compiler, nvcc, the
        GPU, torch, the cache directory and the TVM entry point.

    Examples
    --------
    >>> report = collect()
    >>> report.checks[0].name
    'python'
    """
    return Report(
        version=crossfuse.__version__,
        checks=(
            checks.python(),
            checks.system(),
            *checks.pins(),
            checks.entry_point(),
            checks.cxx(),
            checks.nvcc(),
            checks.gpu(),
            checks.torch(),
            checks.cache(),
        ),
    )
