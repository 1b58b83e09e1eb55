"""Places in generated text where faults are planted, and edits that preserve line numbers."""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from crossfuse.emulate.cuda.translate import GENERATED
from crossfuse.errors import CheckFailed, EnvironmentRefused, RefusedError, refuse
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


# Statements of the generated text, found from addresses in the executable.

_FRAME_PLACE = re.compile(rf"{re.escape(GENERATED)}:(\d+)")


def find_statements(
    executable: Path, addresses: Iterable[int], symbols: tuple[str, ...], cuda: str
) -> dict[int, str]:
    """The statement of each return address, as ``"line N: text"``; the address 0 has none.

    A place in a helper that is inlined into one of the kernels `symbols` becomes the place of its
    call. Without addr2line `EnvironmentRefused` is raised.
    """
    wanted = sorted(set(addresses) - {0})
    if not wanted:
        return {}
    lines = cuda.splitlines()
    statements = {}
    for address, frames in zip(wanted, _frames(executable, wanted), strict=True):
        line = _line(frames, symbols)
        text = lines[line - 1].strip() if 0 < line <= len(lines) else ""
        statements[address] = f"line {line}: {text}" if text else "an unknown statement"
    return statements


def _frames(executable: Path, addresses: list[int]) -> list[list[tuple[str, str]]]:
    tool = shutil.which("addr2line")
    if tool is None:
        raise refuse(
            EnvironmentRefused,
            "emulate-compiler",
            "PATH",
            found="no addr2line",
            limit="the binary utilities that g++ needs",
            instead="install binutils (Debian and Ubuntu: apt-get install binutils)",
        )
    # A return address is the instruction after the call: the byte before it belongs to the call.
    command = [tool, "-e", str(executable), "-f", "-i", "-a", *(hex(a - 1) for a in addresses)]
    output = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    found: list[list[tuple[str, str]]] = []
    function = None
    for line in output.splitlines():
        if line.startswith("0x"):
            found.append([])
        elif function is None:
            function = line
        else:
            found[-1].append((function, line))
            function = None
    return found


def _line(frames: list[tuple[str, str]], symbols: tuple[str, ...]) -> int:
    """Line of the frame in the kernel's body, else of the innermost one in the generated text.

    Helpers are inlined into the kernel, which is therefore the outermost frame of its name.
    """
    places = [(function, _FRAME_PLACE.search(place)) for function, place in frames]
    known = [(function, int(place[1])) for function, place in places if place]
    in_kernel = [line for function, line in known if function in symbols]
    return in_kernel[-1] if in_kernel else known[0][1] if known else 0
