"""PTX of whole tiles as calls of the emulator: TMA copies, and products of warpgroups."""

from __future__ import annotations

import re
from collections.abc import Callable

#: Makes a C++ expression of a matched instruction and its operands.
Translator = Callable[[re.Match[str], list[str]], str]

_ELEMENTS = {"f16": "F16", "bf16": "BF16", "e4m3": "E4M3", "e5m2": "E5M2"}


def _load(match: re.Match[str], operands: list[str]) -> str:
    rank = int(match["rank"])
    destination, map_, *place = operands[: 2 + rank]
    barrier, *more = operands[2 + rank :]
    ranks = more[0] if match["multicast"] else "-1"
    return (
        f"{{ const int place_[] = {{{_signed(place)}}}; "
        f"crossfuse_emulate_tma_load({destination}, {map_}, place_, {rank}, {barrier}, {ranks}); }}"
    )


def _signed(operands: list[str]) -> str:
    return ", ".join(f"int({each})" for each in operands)


def _store_tile(match: re.Match[str], operands: list[str]) -> str:
    map_, *place, source = operands
    way = "add" if match["adds"] else "store"
    return (
        f"{{ const int place_[] = {{{_signed(place)}}}; "
        f"crossfuse_emulate_tma_{way}({map_}, place_, {len(place)}, {source}); }}"
    )


def _load_pixels(match: re.Match[str], operands: list[str]) -> str:
    ranks = operands[9] if match["multicast"] else "-1"
    return f"crossfuse_emulate_tma_load_pixels({', '.join(operands[:9])}, {ranks})"


def _multiply(match: re.Match[str], operands: list[str]) -> str:
    count = int(match["n"]) // 2
    registers = ", ".join(f"&({each})" for each in operands[:count])
    *left, right, keep = operands[count:]
    types = ", ".join(f"CROSSFUSE_{_ELEMENTS[match[side]]}" for side in ("left", "right"))
    transposed = match["transposed"] or "0"
    shape = f"{match['n']}, {match['k']}, {types}, {transposed}"
    call, operand = "wgmma", left[0]
    before = f"float* registers_[] = {{{registers}}}; "
    if match["kept"]:
        before += f"unsigned* left_[] = {{{', '.join(f'&({each})' for each in left)}}}; "
        call, operand = "wgmma_registers", "left_"
    return (
        f"{{ {before}crossfuse_emulate_{call}(registers_, {shape}, {operand}, {right}, {keep}); }}"
    )


def _matrices(match: re.Match[str], operands: list[str]) -> str:
    registers = ", ".join(operands[1:])
    return (
        f"{{ unsigned registers_[] = {{{registers}}}; "
        f"crossfuse_emulate_store_matrices({operands[0]}, registers_, {match[1]}); }}"
    )


_ACCUMULATORS = r"\{[%\d, ]*\}"
#: Patterns of whole instructions, and what becomes of them.
TILE_INSTRUCTIONS: tuple[tuple[str, Translator], ...] = (
    (
        r"cp\.async\.bulk\.tensor\.(?P<rank>[2-5])d\.shared::cluster\.global\."
        r"mbarrier::complete_tx::bytes(?P<multicast>\.multicast::cluster)?"
        r"(?:\.L2::cache_hint)? \[%0\], \[%1, \{[%\d, ]*\}\], \[%\d\](?:, %\d){0,2};",
        _load,
    ),
    (
        r"cp\.async\.bulk\.tensor\.4d\.shared::cluster\.global\.im2col\."
        r"mbarrier::complete_tx::bytes(?P<multicast>\.multicast::cluster)?"
        r"(?:\.L2::cache_hint)? \[%0\], \[%1, \{%2, %3, %4, %5\}\], \[%6\], \{%7, %8\}"
        r"(?:, %9)?(?:, %10)?;",
        _load_pixels,
    ),
    (
        r"cp(?P<adds>\.reduce)?\.async\.bulk\.tensor\.[2-5]d\.global\.shared::cta(?:\.add)?"
        r"\.tile\.bulk_group \[%0, \{[%\d, ]*\}\], \[%\d\];",
        _store_tile,
    ),
    (r"stmatrix\.sync\.aligned\.m8n8\.x(\d)\.shared\.b16 \[%0\], .*", _matrices),
    (
        r"\.reg \.pred \w+; setp\.ne\.b32 \w+, %\d+, 0; wgmma\.mma_async\.sync\.aligned\."
        r"m64n(?P<n>\d+)k(?P<k>\d+)\.f32\.(?P<left>\w+)\.(?P<right>\w+) "
        + _ACCUMULATORS
        + r", (?:%\d+|(?P<kept>\{[%\d, ]*\})), %\d+, \w+, 1, 1"
        + r"(?:(?:, 0)?, (?P<transposed>[01]))?;",
        _multiply,
    ),
)
