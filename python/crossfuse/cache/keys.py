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
    """Cache key of a result: the SHA-256, in hexadecimal, of all that it depends on.

    The package's own files and the versions of TVM and tvm-ffi count, so that another release or an
    edited checkout never finds what this one made; so do the device's limits. `parts` are texts,
    such as the function and its options; ``("ab", "c")`` and ``("a", "bc")`` differ.
    """
    versions = {each.distribution: installed_version(each.distribution) for each in PINS}
    values = [package_hash(), versions, asdict(target), parts]
    return sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


@lru_cache(maxsize=1)
def package_hash() -> str:
    """Hash of this package's files, as they were at the first call."""
    import crossfuse

    home = Path(crossfuse.__file__).parent
    found = sha256()
    for path in sorted(each for each in home.rglob("*") if each.suffix in _SUFFIXES):
        data = path.read_bytes()
        found.update(f"{path.relative_to(home).as_posix()}\0{len(data)}\0".encode())
        found.update(data)
    return found.hexdigest()
