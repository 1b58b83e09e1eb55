"""Faults planted in the text of a kernel, beside those of `crossfuse.emulate.cuda`."""

from __future__ import annotations

import re
from dataclasses import replace

from crossfuse.lower.image import KernelImage


def one_changed(
    image: KernelImage, pattern: str, by: str, index: int = 0, *, body: bool = False
) -> KernelImage:
    """One place that a pattern finds, changed; of the last kernel with `body`."""
    start = image.cuda.rindex("__global__") if body else 0
    places = list(re.compile(pattern).finditer(image.cuda, start))
    assert places, pattern
    found = places[index]
    text = image.cuda[: found.start()] + found.expand(by) + image.cuda[found.end() :]
    return replace(image, cuda=text)


def all_changed(image: KernelImage, pattern: str, by: str) -> KernelImage:
    """All places that a pattern finds, changed; there is at least one."""
    text, count = re.subn(pattern, by, image.cuda)
    assert count, pattern
    return replace(image, cuda=text)
