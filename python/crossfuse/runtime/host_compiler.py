"""Finding the C++ compiler that builds launchers (nvcc needs one too)."""

from __future__ import annotations

import shutil
from pathlib import Path

from crossfuse.errors import EnvironmentRefused, refuse

COMPILERS = ("g++", "clang++", "c++")


def find_host_compiler() -> Path:
    """Find a C++17 compiler in ``PATH``.

    Returns
    -------
    pathlib.Path
        The first of `COMPILERS`.

    Raises
    ------
    EnvironmentRefused
        If there is none.

    Examples
    --------
    >>> compiler = find_host_compiler()
    """
    for name in COMPILERS:
        path = shutil.which(name)
        if path:
            return Path(path)
    raise refuse(
        EnvironmentRefused,
        "host-compiler",
        "PATH",
        found="no " + ", ".join(COMPILERS),
        limit="a C++17 compiler",
        instead="install g++ (Debian and Ubuntu: apt-get install g++)",
    )
