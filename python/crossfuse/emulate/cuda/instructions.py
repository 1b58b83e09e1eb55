"""The PTX instructions that the emulator knows, each as a call of its own."""

from __future__ import annotations

import re
from collections.abc import Callable

# PTX of whole tiles as calls of the emulator: TMA copies, and products of warpgroups.

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


def _store_tile(_: re.Match[str], operands: list[str]) -> str:
    map_, *place, source = operands
    return (
        f"{{ const int place_[] = {{{_signed(place)}}}; "
        f"crossfuse_emulate_tma_store({map_}, place_, {len(place)}, {source}); }}"
    )


def _load_pixels(match: re.Match[str], operands: list[str]) -> str:
    ranks = operands[9] if match["multicast"] else "-1"
    return f"crossfuse_emulate_tma_load_pixels({', '.join(operands[:9])}, {ranks})"


def _multiply(match: re.Match[str], operands: list[str]) -> str:
    """A product of a warpgroup, with the addresses of its registers as arguments.

    In an array each would be a store to the stack, and every such store is checked.
    """
    count = int(match["n"]) // 2
    registers = [f"&({each})" for each in operands[:count]]
    *left, right, keep = operands[count:]
    types = ", ".join(f"CROSSFUSE_{_ELEMENTS[match[side]]}" for side in ("left", "right"))
    shape = f"{match['n']}, {match['k']}, {types}, {match['transposed'] or '0'}"
    if match["kept"]:
        kept = ", ".join(f"&({each})" for each in left)
        call = f"wgmma_registers({shape}, {kept}, {right}, {keep}"
    else:
        call = f"wgmma({shape}, {left[0]}, {right}, {keep}"
    return f"crossfuse_emulate_{call}, {', '.join(registers)})"


def _multiply_by_warp(match: re.Match[str], operands: list[str]) -> str:
    """A product of a warp: sums, two rows of the left operand, one column of the right one."""
    sums = ", ".join(f"&({each})" for each in operands[:4])
    given = ", ".join(operands[4:])
    return f"crossfuse_emulate_warp_multiply(CROSSFUSE_{_ELEMENTS[match['type']]}, {sums}, {given})"


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
        r"cp\.async\.bulk\.tensor\.[2-5]d\.global\.shared::cta"
        r"\.tile\.bulk_group \[%0, \{[%\d, ]*\}\], \[%\d\];",
        _store_tile,
    ),
    (
        r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.(?P<type>bf16|f16)\.(?P=type)\.f32 "
        r"\{%0, %1, %2, %3\}, \{%4, %5, %6, %7\}, \{%8, %9\}, \{%0, %1, %2, %3\};",
        _multiply_by_warp,
    ),
    (
        r"movmatrix\.sync\.aligned\.m8n8\.trans\.b16 %0, %1;",
        lambda _, operands: f"{operands[0]} = crossfuse_emulate_warp_transpose({operands[1]})",
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


_NOTHING = "((void)0)"
_READ_TYPES = {
    "b8": "unsigned char",
    "b16": "unsigned short",
    "b32": "unsigned",
    "f32": "float",
    "v2.f32": "float2",
}
_FORMATS = {"bf16x2": "Bfloat16", "f16x2": "Half"}


def _call(name: str, *extra: str) -> Translator:
    """A translator to a call of the emulator with all operands, then `extra`."""
    return lambda _, operands: f"crossfuse_emulate_{name}({', '.join([*operands, *extra])})"


def _text(template: str) -> Translator:
    """A translator to a text with operands by their numbers."""
    return lambda _, operands: template.format(*operands)


def _arrive(match: re.Match[str], operands: list[str]) -> str:
    count = operands[1] if len(operands) > 1 else "1"
    scope = match["scope"] or ("cluster" if match["space"] == "cluster" else "cta")
    released = "-1" if match["order"] == "relaxed" else _scope(scope)
    return f"crossfuse_emulate_mbarrier_arrive({operands[0]}, {count}, 0, {released})"


def _scope(name: str) -> str:
    """The constant of a scope."""
    return f"CROSSFUSE_{name.upper()}"


def _acquired(match: re.Match[str]) -> str:
    """The scope that a wait acquires from; a relaxed wait acquires nothing."""
    return "-1" if match["order"] == "relaxed" else _scope(match["scope"] or "cta")


def _wait(match: re.Match[str], operands: list[str]) -> str:
    barrier, parity, *_ = operands
    return f"crossfuse_emulate_mbarrier_wait({barrier}, {parity}, {_acquired(match)})"


def _look(match: re.Match[str], operands: list[str]) -> str:
    """Whether the first phase of a barrier is complete: at once, or a while later."""
    target, barrier, *_ = operands
    call = f"crossfuse_emulate_mbarrier_{match['way']}"
    return f"{target} = {call}({barrier}, {_acquired(match)})"


def _either(match: re.Match[str], operands: list[str]) -> str:
    target, barrier, other, *_ = operands
    call = "crossfuse_emulate_mbarrier_either"
    return f"{target} = {call}({barrier}, {other}, {_acquired(match)})"


def _store_negative(_: re.Match[str], operands: list[str]) -> str:
    value, address = operands
    return f"if ({value} < 0) {{ {_store_values('shared', [address, value])} }}"


def _store_values(way: str, operands: list[str], more: str = "") -> str:
    """A store of floats to a shared address, by a function of the emulator."""
    address, *values = operands
    return (
        f"{{ float values_[] = {{{', '.join(values)}}}; "
        f"crossfuse_emulate_store_{way}({address}, values_, {4 * len(values)}{more}); }}"
    )


def _push(_: re.Match[str], operands: list[str]) -> str:
    *stored, barrier = operands
    return _store_values("async", stored, f", {barrier}")


def _taken(targets: list[str]) -> str:
    """Assignments of the loaded values."""
    return "; ".join(f"{each} = values_[{i}]" for i, each in enumerate(targets))


def _fetch(_: re.Match[str], operands: list[str]) -> str:
    *targets, address = operands
    return (
        f"{{ float values_[4]; crossfuse_emulate_load_shared({address}, values_, "
        f"{4 * len(targets)}); {_taken(targets)}; }}"
    )


def _store_shared(_: re.Match[str], operands: list[str]) -> str:
    return _store_values("shared", operands)


def _load_four(match: re.Match[str], operands: list[str]) -> str:
    """A load of four words; a relaxed one too is checked as unordered.

    No other thread may write them meanwhile.
    """
    kind = "uint4" if match["type"] == "u32" else "float4"
    *targets, address = operands
    parts = zip(targets, "xyzw", strict=True)
    taken = "; ".join(f"{each} = values_.{part}" for each, part in parts)
    return f"{{ const {kind} values_ = *(const {kind}*)({address}); {taken}; }}"


def _read(match: re.Match[str], operands: list[str]) -> str:
    """A load of one register or two neighbours, at an address of their alignment."""
    *targets, address = operands
    value = f"*(const {_READ_TYPES[match['type']]}*)({address})"
    if len(targets) == 1:
        return f"{targets[0]} = {value}"
    low, high = targets
    return f"{{ const auto value_ = {value}; {low} = value_.x; {high} = value_.y; }}"


def _pack(match: re.Match[str], operands: list[str]) -> str:
    kind = f"crossfuse_emulated::{_FORMATS[match[1]]}"
    return f"{operands[0]} = crossfuse_ptx_pack<{kind}>({operands[1]}, {operands[2]})"


def _await_copies(match: re.Match[str], _: list[str]) -> str:
    return f"crossfuse_emulate_bulk_wait({match['pending']}, {int(match['read'] is not None)})"


def _fence(match: re.Match[str], _: list[str]) -> str:
    return f"crossfuse_emulate_fence_async(CROSSFUSE_{(match['space'] or 'all').upper()})"


def _order(match: re.Match[str]) -> str:
    """The constants of the order and the scope of an access to a flag."""
    order = (match["order"] or "weak").upper()
    return f"CROSSFUSE_{order}, {_scope(match['scope'] or 'cta')}"


def _flag_load(match: re.Match[str], operands: list[str]) -> str:
    target, address = operands
    return f"{target} = crossfuse_emulate_flag_load((const void*)({address}), {_order(match)})"


def _flag_store(match: re.Match[str], operands: list[str]) -> str:
    address, value = operands
    return f"crossfuse_emulate_flag_store((void*)({address}), {value}, {_order(match)})"


def _flag_add(match: re.Match[str], operands: list[str]) -> str:
    *target, address, value = operands
    call = f"crossfuse_emulate_flag_add((void*)({address}), {value}, {_order(match)})"
    return f"{target[0]} = {call}" if target else call


def _extreme(match: re.Match[str], operands: list[str]) -> str:
    target, one, other = operands
    further = "<" if match["which"] == "max" else ">"
    return f"{target} = {one} {further} {other} || {other} != {other} ? {other} : {one}"


_WORD = r"(?:u32|s32|b32)"
_ACQUIRE = r"\.(?P<order>acquire|relaxed)\.(?P<scope>cta|cluster)"
_SCOPE = r"\.(?P<scope>cta|cluster|gpu|sys)"
#: Patterns of whole instructions, and what becomes of them.
INSTRUCTIONS: list[tuple[re.Pattern[str], Translator]] = [
    (re.compile(pattern), translator)
    for pattern, translator in (
        *TILE_INSTRUCTIONS,
        (
            r"|setmaxnreg\..*|prefetch\.(?:tensormap|global).*|nanosleep\..*",
            lambda *_: _NOTHING,
        ),
        (r"griddepcontrol\.launch_dependents;", _call("launch_dependents")),
        (r"griddepcontrol\.wait;", _call("grid_wait")),
        # Deadlines are for what never comes, which the emulator reports as a deadlock.
        (r"trap;", lambda *_: _NOTHING),
        (r"mov\.u64 %0, %+globaltimer;", _text("{0} = 0")),
        (r"ex2\.approx\.ftz\.f32 %0, %1;", _text("{0} = exp2f({1})")),
        (r"(?P<which>max|min)\.NaN\.f32 %0, %1, %2;", _extreme),
        (r"fence\.proxy\.async(?:\.(?P<space>shared|global)(?:::(?:cta|cluster))?)?;", _fence),
        (r"(?:fence\.(?:acq_rel|sc)\.(?:gpu|sys)|membar\.(?:gl|sys));", _call("fence_memory")),
        (r"fence\.(?:acq_rel|sc)\.(?:cta|cluster);", lambda *_: _NOTHING),
        (r"bar\.sync %0, %1;", _call("named_barrier")),
        (r"bar\.arrive %0, %1;", _call("named_arrive")),
        (
            r"mapa\.shared::cluster\.u32 %0, %1, %2;",
            _text("{0} = crossfuse_emulate_map_rank({1}, {2})"),
        ),
        (r"fence\.mbarrier_init\.release\.cluster;", _call("fence_initialised")),
        (r"mbarrier\.init\.shared\.b64 \[%0\], %1;", _call("mbarrier_init")),
        (
            r"mbarrier\.arrive\.expect_tx\.shared\.b64 _, \[%0\], %1;",
            _text(f"crossfuse_emulate_mbarrier_arrive({{0}}, 1, {{1}}, {_scope('cta')})"),
        ),
        (
            r"mbarrier\.arrive(?:\.(?P<order>release|relaxed)\.(?P<scope>cta|cluster))?"
            r"\.shared(?:::(?P<space>cta|cluster))?\.b64 _, \[%0\](?:, %1)?;",
            _arrive,
        ),
        (
            r"\.reg \.pred p; mbarrier\.(?P<way>try|test)_wait\.parity"
            + _ACQUIRE
            + r"\.shared::cta\.b64 p, "
            r"\[%1\], 0(?:, %2)?; selp\.u32 %0, 1, 0, p;",
            _look,
        ),
        (
            r"\.reg \.pred f, c; mov\.u32 %0, 0; .*mbarrier\.try_wait\.parity"
            rf"(?:{_ACQUIRE})?.*test_wait\.parity.*",
            _either,
        ),
        (
            r"\.reg \.pred P1; .*mbarrier\.try_wait\.parity"
            rf"(?:{_ACQUIRE})?.*",
            _wait,
        ),
        (r"cp\.async\.bulk\.commit_group;", _call("bulk_commit")),
        (r"cp\.async\.bulk\.wait_group(?P<read>\.read)? (?P<pending>\d+);", _await_copies),
        (
            r"st\.async\.(?:weak\.)?shared::cluster\.mbarrier::complete_tx::bytes(?:\.v[24])?\.f32 "
            r"\[%0\], (?:\{[%\d, ]*\}|%1), \[%\d\];",
            _push,
        ),
        (r"st\.global\.u32 \[%0\], %1;", _text("*(unsigned*)({0}) = {1}")),
        (
            r"st\.global\.v4\.f32 \[%0\], \{%1, %2, %3, %4\};",
            _text("*(float4*)({0}) = make_float4({1}, {2}, {3}, {4})"),
        ),
        (r"st\.shared\.v[24]\.f32 \[%0\], \{[%\d, ]*\};", _store_shared),
        (
            r"st\.global\.v2\.f32 \[%0\], \{%1, %2\};",
            _text("*(float2*)({0}) = make_float2({1}, {2})"),
        ),
        (r"ld\.global\.v4\.(?P<type>f32) \{[%\d, ]*\}, \[%\d\];", _load_four),
        (r"ld\.relaxed\.gpu\.global\.v4\.(?P<type>u32) \{[%\d, ]*\}, \[%\d\];", _load_four),
        (r"ld\.global\.(?P<type>b8|b16|b32|f32) %0, \[%1\];", _read),
        (r"ld\.global\.(?P<type>v2\.f32) \{%0, %1\}, \[%2\];", _read),
        (
            r"ld(?:\.(?P<order>acquire|relaxed)"
            + _SCOPE
            + r"|\.weak|\.volatile)?\.global\."
            + _WORD
            + r" %0, \[%1\];",
            _flag_load,
        ),
        (
            rf"st\.(?P<order>release|relaxed){_SCOPE}\.global\.{_WORD} \[%0\], %1;",
            _flag_store,
        ),
        (
            rf"red\.(?P<order>release|relaxed){_SCOPE}\.global\.add\.[us]32 \[%0\], %1;",
            _flag_add,
        ),
        (
            rf"atom\.(?:add\.)?(?P<order>acq_rel|acquire|release|relaxed){_SCOPE}\.global\."
            r"(?:add\.)?[us]32 %0, \[%1\], %2;",
            _flag_add,
        ),
        (r"ld\.shared(?:\.v[24])?\.f32 (?:\{[%\d, ]*\}|%0), \[%\d\];", _fetch),
        (r"cvt\.rn\.(bf16x2|f16x2)\.f32 %0, %1, %2;", _pack),
        (
            r"\.reg \.pred p; setp\.lt\.f32 p, %0, 0f00000000; @p st\.shared\.f32 \[%1\], %0;",
            _store_negative,
        ),
        (r"mov\.b32 %0, 0;", _text("{0} = 0")),
        (r"wgmma\.fence\.sync\.aligned;", _call("wgmma_fence")),
        (r"wgmma\.commit_group\.sync\.aligned;", _call("wgmma_commit")),
        (
            r"wgmma\.wait_group\.sync\.aligned (\d+);",
            lambda match, _: f"crossfuse_emulate_wgmma_wait({match[1]})",
        ),
    )
]
