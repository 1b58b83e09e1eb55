"""Keys of the cache: hashes of all that a result depends on."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import lru_cache
from hashlib import sha256
from pathlib import Path

from crossfuse._compat import PINS, installed_version
from crossfuse.hardware import Device

#: Files of the package that decide what is made.
_SUFFIXES = frozenset({".cpp", ".cu", ".cuh", ".h", ".in", ".json", ".py"})


def content_key(target: Device, *parts: str) -> str:
    """Hash what a result depends on.

    This package, TVM and tvm-ffi count with what they are now, so that another release, or an
    edited checkout, never finds what this one made.

    Parameters
    ----------
    target : Device
        Its limits.
    *parts : str
        Texts: the function, options, other versions. ``("ab", "c")`` and ``("a", "bc")`` differ.

    Returns
    -------
    str
        SHA-256 as hexadecimal text.
    """
    versions = {each.distribution: installed_version(each.distribution) for each in PINS}
    values = [package_hash(), versions, asdict(target), parts]
    return sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


@lru_cache(maxsize=1)
def package_hash() -> str:
    """Hash of this package's own files, as they were when it was asked for first."""
    import crossfuse

    home = Path(crossfuse.__file__).parent
    found = sha256()
    for path in sorted(each for each in home.rglob("*") if each.suffix in _SUFFIXES):
        data = path.read_bytes()
        found.update(f"{path.relative_to(home).as_posix()}\0{len(data)}\0".encode())
        found.update(data)
    return found.hexdigest()
