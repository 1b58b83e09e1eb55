"""Rules for mutants that are no faults in warps' waits for flags in global memory, and fences.

As in `mutation.equivalent`, a rule takes the lines of the right text, which
statements had something to do, and a mutant in which nothing was found; it gives the reason, or an
empty text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from mutation.mutants import Mutant, indent_of

#: By line of the right text, whether a statement there that ran has had something to do.
Uses = Mapping[int, bool]
#: Text of what raises flags, and of what waits for them or for what is counted by them.
_FLAG_HELPERS = re.compile(
    r"^\S[^\n;]* crossfuse_(?P<name>raise_flag|await_flags\w*|await_parts)\([^;{]*\)\s*\{.*?^\}",
    re.MULTILINE | re.DOTALL,
)
_FLAG_READ = re.compile(r"^\s*uint \w+ = (?P<flags>crossfuse_flags_\w+)\[")
_FIRST_LANE = re.compile(r"^\s*if \(\(\(\(int\)threadIdx\.x\) % 32\) == 0\) \{$")
_AWAIT = re.compile(r"crossfuse_(?P<name>await_(?:flags\w*|parts))\(")
#: Headers of blocks that are entered: of loops over steps, and of the first look at flags, which
#: begins with none.
_SURE = re.compile(r"for \(int step_?\d* = 0; step_?\d* < [1-9]\d*; |if \(ready_ptr\[0\] <= 0\) \{")
#: What others may see, or wait for.
TOUCHES = re.compile(
    r"memory_ptr|tvm_builtin_ptx_(?:st_|ld_|stmatrix)|crossfuse_dsm_|_wait|await|arrive"
)


def fences_flags(lines: Sequence[str]) -> bool:
    """Whether a fence precedes every release of a flag, and one follows every wait for flags."""
    text = "\n".join(lines)
    sides = [each[0] for each in _FLAG_HELPERS.finditer(text)]
    return len(sides) > 1 and all("fence.proxy.async.global" in each for each in sides)


def read_by_loads(lines: Sequence[str]) -> bool:
    """Whether all data that flags announce is read by ordinary loads alone.

    The completion of a bulk copy includes a proxy fence (PTX ISA, async proxy), and it is waited
    for before flags are raised.
    """
    names = {each["name"] for each in _FLAG_HELPERS.finditer("\n".join(lines))}
    return names == {"raise_flag", "await_parts"}


#: The left side of a store to the memory that several GPUs have in common.
_SHOWN = re.compile(r"^\s*(?:\*\(\w+\*\)\()?\w*peer_ptr\b[^=]* = ")


def tells_of_loads(lines: Sequence[str], uses: Uses, mutant: Mutant) -> str:
    """Ranks are told that slabs were read, which is over when they learn of it in any scope."""
    if mutant.change != "a release to the GPU" or "arrive_at_ranks" not in mutant.statement:
        return ""
    for line in reversed(lines[: mutant.line - 1]):
        if _SHOWN.match(line):
            return ""
        if "__global__" in line:
            break
    return "ranks are told of loads alone, which are over"


def met_before_the_store(lines: Sequence[str], uses: Uses, mutant: Mutant) -> str:
    """All lanes read a word, but the lane that writes it does so only after another meeting."""
    before = _FLAG_READ.match(lines[mutant.line - 2])
    if mutant.operation != "drop" or "warp_sync" not in mutant.statement or not before:
        return ""
    indent, headers, none = indent_of(lines[mutant.line - 1]), list[str](), False
    for line in lines[mutant.line :]:
        if not line.strip():
            continue
        depth = (indent_of(line) - indent) // 2
        if depth < 0 or line.strip().startswith(before["flags"]):
            return ""
        headers[depth:] = [line.strip()]
        none |= line.strip() == "ready_ptr[0] = 0;"  # flags are known to be raised
        called = _AWAIT.search(line)
        if called and (none or depth == 0) and all(_SURE.match(each) for each in headers[:-1]):
            met = _meets_in_the_end(lines, called["name"])
            return (
                "lanes have read a flag alone, and meet again before one writes it" if met else ""
            )
    return ""


def _meets_in_the_end(lines: Sequence[str], name: str) -> bool:
    """Whether the lanes of a warp meet in a helper, whatever its arguments."""
    helpers = _FLAG_HELPERS.finditer("\n".join(lines))
    return any(each["name"] == name and "\n  __syncwarp();" in each[0] for each in helpers)


def awaited_by_one(lines: Sequence[str], uses: Uses, mutant: Mutant) -> str:
    """Only the first lane learns from a wait for one flag, and it alone touches memory then."""
    one = re.search(r"await_flags\w*\(.*, ready_ptr\[0\], 0, 1, ", mutant.statement)
    if mutant.change != "no __syncwarp" or not one:
        return ""
    start = next((n for n in range(mutant.line - 1, -1, -1) if _FLAG_READ.match(lines[n])), -1)
    if start < 0 or not re.search("warp_sync", lines[start + 1]):  # of other lanes' reads of flags
        return ""
    role, lane = indent_of(lines[start]), 0
    for line in lines[start + 2 :]:
        if line.strip() and indent_of(line) < role:
            return "the lane that waits for the flag learns of it, and alone touches memory then"
        if lane and line.strip() and indent_of(line) <= lane:
            lane = 0
        touches = TOUCHES.search(line) or "flags_" in line
        if not lane and touches and line.strip() != mutant.statement:
            return ""
        if not lane and _FIRST_LANE.match(line):
            lane = indent_of(line)
    return ""


def helps_in_the_end(lines: Sequence[str], uses: Uses, mutant: Mutant) -> str:
    """A wait for flags that never come ends by helping, which makes all that they announce."""
    if mutant.change == "a count more is awaited" and "_or_help(" in mutant.statement:
        return "a wait that flags do not end is ended by help, which orders as much"
    return ""
