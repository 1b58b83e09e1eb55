"""From generated CUDA to C++ that g++ compiles against the emulator's device headers.

Almost everything is left as it is: the headers define CUDA's keywords, types and intrinsics, and
the text's own preamble compiles against stand-ins for CUDA's headers. Only declarations of shared
memory and a few lines of inline PTX have no C++ spelling; they are replaced within their line, so
line numbers stay those of the generated text.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from crossfuse.emulate.cuda.instructions import INSTRUCTIONS
from crossfuse.errors import CheckFailed, EnvironmentRefused, RefusedError, refuse
from crossfuse.lower.image import KernelImage

# Inline PTX of generated text as calls of the emulator.
#
# TVM wraps each instruction in a helper with one ``asm`` statement. The statement is taken apart
# and its instruction looked up; operands stay as they are, so that helpers keep their C++ types.

_START = re.compile(r"\basm\s*(?:volatile)?\s*\(")
_TEXT = re.compile(r'\s*((?:"(?:[^"\\]|\\.)*"\s*)+)')
_LITERAL = re.compile(r'"((?:[^"\\]|\\.)*)"')
_OPERAND = re.compile(r'"[=+&]*\w+"\s*\(')
#: Registers that a helper passes on to wgmma: their places are wanted, as they may change
#: meanwhile.
_FROM_REGISTERS = re.compile(r"wgmma\w*_rs_\w*\([^()]*__a0[^()]*\)")
_BY_VALUE = re.compile(r"\buint32_t (__a\d)\b")


def translate_asm(text: str) -> str:
    """Replace every ``asm`` statement whose instruction is known, keeping the number of lines.

    Special registers and cluster barriers must have been replaced before. Unknown statements stay:
    some stand in parts that the preprocessor removes, and the C++ compiler names the others.
    """
    text = _FROM_REGISTERS.sub(lambda each: _BY_VALUE.sub(r"uint32_t& \1", each[0]), text)
    parts: list[str] = []
    position = 0
    for start in _START.finditer(text):
        if start.start() < position:
            continue
        end = _closing(text, start.end())
        statement = text[start.start() : end + 1]
        call = _translate(text[start.end() : end])
        if call is None:
            continue
        parts += [text[position : start.start()], call, "\n" * statement.count("\n")]
        position = end + 1
    return "".join([*parts, text[position:]])


def _translate(body: str) -> str | None:
    match = _TEXT.match(body)
    if match is None:
        return None
    text = "".join(_LITERAL.findall(match[1])).replace("\\n", " ").replace("\\t", " ")
    instruction = " ".join(text.split()).strip("{} ")
    operands = _operands(body[match.end() :])
    for pattern, translator in INSTRUCTIONS:
        found = pattern.fullmatch(instruction)
        if found:
            return translator(found, operands)
    return None


def _operands(text: str) -> list[str]:
    """Expressions of outputs and inputs, in the order of their numbers."""
    found: list[str] = []
    position = 0
    while match := _OPERAND.search(text, position):
        end = _closing(text, match.end())
        found.append(text[match.end() : end].strip())
        position = end + 1
    return found


def _closing(text: str, position: int) -> int:
    """Index of the parenthesis that closes the one before `position`."""
    depth, quoted = 1, False
    while True:
        character = text[position]
        if character == "\\" and quoted:
            position += 1
        elif character == '"':
            quoted = not quoted
        elif not quoted:
            depth += {"(": 1, ")": -1}.get(character, 0)
            if depth == 0:
                return position
        position += 1


#: Name of the file that is compiled, as debug information and messages have it.
GENERATED = "crossfuse_generated.cu"

_ALIGN = r"(?:(?:alignas|__align__)\s*\(\s*(?P<{0}>\d+)\s*\)\s*)?"
_SHARED = re.compile(
    r"(?P<extern>extern\s+)?__shared__\s+"
    + _ALIGN.format("align")
    + r"(?P<type>[A-Za-z_][\w:]*(?:\s+[A-Za-z_][\w:]*)*)\s+(?P<name>\w+)"
    + r"\s*\[(?P<first>[^\]]*)\](?P<rest>(?:\s*\[[^\]]*\])*)\s*;"
)
_REGISTER = re.compile(
    r"asm\s*(?:volatile)?\s*\(\s*\"mov\.[usb](?:32|64)\s+%0,\s*%+(?P<register>[\w.]+);\""
    r"\s*:\s*\"=[rl]\"\s*\(\s*(?P<target>\w+)\s*\)\s*:?\s*\)"
)
_CLUSTER_BARRIER = re.compile(
    r"asm\s*(?:volatile)?\s*\(\s*\"barrier\.cluster\.(?P<half>arrive|wait)(?P<order>[\w.]*);\"[^)]*\)"
)

_VECTORS = {
    "tid": "CROSSFUSE_THREAD_INDEX",
    "ctaid": "CROSSFUSE_BLOCK_INDEX",
    "ntid": "CROSSFUSE_BLOCK_EXTENT",
    "nctaid": "CROSSFUSE_GRID_EXTENT",
    "cluster_ctaid": "CROSSFUSE_CTA_IN_CLUSTER",
    "cluster_nctaid": "CROSSFUSE_CLUSTER_EXTENT",
    "clusterid": "CROSSFUSE_CLUSTER_INDEX",
    "nclusterid": "CROSSFUSE_CLUSTER_GRID",
}
_EXTENT = "crossfuse_emulate_index(CROSSFUSE_CLUSTER_EXTENT)"
_SCALARS = {
    "cluster_ctarank": "crossfuse_emulate_cluster_rank()",
    "cluster_nctarank": f"({_EXTENT}.x * {_EXTENT}.y * {_EXTENT}.z)",
    "laneid": "(crossfuse_emulate_thread_rank() % 32)",
    "warpid": "(crossfuse_emulate_thread_rank() / 32)",
    "globaltimer": "1",  # nothing here takes time
}


@dataclass(frozen=True)
class Translation:
    """C++ text for one image."""

    #: The translation unit.
    source: str
    #: Kernels in the order of their table.
    symbols: tuple[str, ...]


def translate(image: KernelImage) -> Translation:
    """Translate an image's text to C++ that needs ``device.h`` included first.

    It defines the table of kernels. Unknown forms of shared memory declarations or special
    registers, and launched kernels that the text lacks, raise `CheckFailed`.
    """
    count = 0

    def declare(match: re.Match[str]) -> str:
        nonlocal count
        count += 1
        return _declaration(match, count)

    text = _SHARED.sub(declare, image.cuda)
    text = _REGISTER.sub(lambda match: _register(match, image), text)
    text = _CLUSTER_BARRIER.sub(_cluster_barrier, text)
    text = translate_asm(text)
    for number, line in enumerate(text.splitlines(), 1):
        if "__shared__" in line.partition("//")[0]:
            raise _unknown(image, f"line {number} `{line.strip()}`", "an array of known extents")
    symbols = tuple(dict.fromkeys(launch.symbol for launch in image.launches))
    for symbol in symbols:
        if not re.search(rf"__global__[^;{{]*\b{re.escape(symbol)}\s*\(", text):
            raise _unknown(image, f"no kernel `{symbol}`", "every launched symbol")
    table = ", ".join(f"CROSSFUSE_KERNEL({symbol})" for symbol in symbols)
    # The table stands behind the text and device.h is included by the compiler's command line, so
    # that line N of the file is line N of the generated text.
    source = (
        f'{text}\nextern "C" const CrossfuseKernel crossfuse_kernels[] = {{{table}}};\n'
        f'extern "C" const unsigned crossfuse_kernel_count = {len(symbols)};\n'
    )
    return Translation(source, symbols)


def _declaration(match: re.Match[str], count: int) -> str:
    """A declaration of a pointer rather than an array, whose bounds g++ would trust."""
    element = f"{match['type']}{match['rest'] and ' (*)' + match['rest']}"
    pointer = element if match["rest"] else f"{match['type']}*"
    align = match["align"] or "16"
    if match["extern"]:
        call = f"crossfuse_emulate_dynamic_shared({align})"
    else:
        array = f"{match['type']}[{match['first']}]{match['rest']}"
        name = match["name"]
        call = f'crossfuse_emulate_static_shared({count}, sizeof({array}), {align}, "{name}")'
    return f"auto* const {match['name']} = ({pointer})({call});"


def _cluster_barrier(match: re.Match[str]) -> str:
    relaxed = int("relaxed" in match["order"])
    return (
        f"crossfuse_emulate_cluster_{match['half']}({relaxed if match['half'] == 'arrive' else ''})"
    )


def _register(match: re.Match[str], image: KernelImage) -> str:
    register = match["register"]
    value = _SCALARS.get(register)
    vector, _, axis = register.partition(".")
    if vector in _VECTORS and axis in ("x", "y", "z"):
        value = f"crossfuse_emulate_index({_VECTORS[vector]}).{axis}"
    if value is None:
        raise _unknown(image, f"special register %{register}", ", ".join((*_SCALARS, *_VECTORS)))
    return f"{match['target']} = {value}"


def _unknown(image: KernelImage, found: str, limit: str) -> CheckFailed:
    return refuse(
        CheckFailed,
        "emulate-translate",
        f"generated text of {image.name}",
        found=found,
        limit=limit,
        instead="generate text in the form the emulator knows",
    )


# Places in generated text where faults are planted, and edits that preserve line numbers.


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
