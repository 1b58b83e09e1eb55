"""Places in generated text where faults are planted, and edits that preserve line numbers."""

from __future__ import annotations

import dataclasses
import re

from crossfuse.errors import CheckFailed, RefusedError, refuse
from crossfuse.lower.image import KernelImage


def calls_of(text: str, name: re.Pattern[str]) -> list[tuple[int, int]]:
    """Find calls in the bodies of kernels, as spans from the name to the closing parenthesis."""
    spans = []
    for kernel in re.finditer(r"__global__[^;{]*\{", text):
        body_end = closing(text, kernel.end() - 1)
        for match in name.finditer(text, kernel.end(), body_end):
            spans.append((match.start(), closing(text, match.end() - 1) + 1))
    return spans


def arguments_of(text: str, start: int, end: int) -> list[tuple[int, int]]:
    """Spans of the arguments of the call at ``text[start:end]``."""
    depth, spans, at = 0, [], text.index("(", start) + 1
    for position in range(at, end - 1):
        depth += (text[position] in "([{") - (text[position] in ")]}")
        if text[position] == "," and depth == 0:
            spans.append((at, position))
            at = position + 1
    return [*spans, (at, end - 1)]


def closing(text: str, opening: int) -> int:
    """Position of the bracket that closes the one at `opening`."""
    depth = 0
    for position in range(opening, len(text)):
        depth += (text[position] in "([{") - (text[position] in ")]}")
        if depth == 0:
            return position
    return len(text)


def replaced(image: KernelImage, start: int, end: int, by: str) -> KernelImage:
    """The image with a span of its text replaced."""
    return dataclasses.replace(image, cuda=image.cuda[:start] + by + image.cuda[end:])


def nothing_to_plant(image: KernelImage, found: str, limit: str) -> RefusedError:
    """Build the refusal of a fault for which the text has no place."""
    return refuse(
        CheckFailed,
        "plant-fault",
        f"generated text of {image.name}",
        found=found,
        limit=limit,
        instead="plant another fault, or one in a kernel that has what it needs",
    )


def indent_of(line: str) -> int:
    """Number of blanks before a line's first character."""
    return len(line) - len(line.lstrip())
