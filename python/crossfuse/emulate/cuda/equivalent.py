"""Mutants that are no faults, and why, by rules about the text and about what ran.

A rule is about one kind of mutants, of any kernel. What a statement had to do is what the runtime
has noted of the right kernel, with the same inputs: a wait for a phase that is complete from the
start, a fence behind which nothing was touched, or a line that these sizes never come to, may be
left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from crossfuse.emulate.cuda.mutants import Mutant

#: By line of the right text, whether a statement there that ran has had something to do.
Uses = Mapping[int, bool]

_MEET = re.compile(r"bar_sync|cta_sync|warp_sync|__syncthreads|__syncwarp")
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
#: Statements that do nothing but wait: nothing is issued and nobody is told of anything by them.
_WAIT = re.compile(r"behind `\w*(?:mbarrier_wait|bulk_wait|wgmma_wait)\w*\(")
_PEERS = re.compile(r"shared__cluster_b64|st_async|_s2c_|crossfuse_dsm_|mapa")
#: Of the first thread of a warpgroup alone.
_FIRST = re.compile(r"^\s*if \(.*(?:% 128\) == 0\)|& 127\) < 1\)) \{$")
_TOUCHES = re.compile(
    r"memory_ptr|tvm_builtin_ptx_(?:st_|ld_|stmatrix)|crossfuse_dsm_|_wait|await|arrive"
)


#: Of a mutant of groups, if the runtime has noted the same guarantees as of the right kernel: all
#: that groups do is end what their thread waits for, and others know of that by releases alone.
#: What the thread itself does too early, the runtime names.
TELLS_THE_SAME = "all that others learn of tells of the same copies and products"
_GROUP = re.compile(r"wgmma_(?:wait|commit)|cp_async_bulk_(?:wait|commit)")


def is_of_groups(mutant: Mutant) -> bool:
    """Whether a mutant changes which copies or products a thread waits for, and nothing else."""
    return bool(_GROUP.search(mutant.statement.partition("(")[0]))


def reason_of(lines: Sequence[str], uses: Uses, mutant: Mutant, news: Uses | None = None) -> str:
    """Why a mutant is no fault; empty if no rule says so.

    Parameters
    ----------
    lines : Sequence[str]
        Of the right text.
    uses : Uses
        What statements had to do.
    mutant : Mutant
        One that nothing was found in.
    news : Uses | None
        Of arrivals, whether who waits for them learns anything.

    Returns
    -------
    str
        The reason.
    """
    if mutant.operation == "part" and _met_behind(lines, mutant):
        return "who waits meets the others before anything is touched"
    if mutant.operation == "part":  # what nobody needs to do, some need not do either
        mutant = replace(mutant, operation="drop", change="left out")
    for rule in _RULES:
        if reason := rule(lines, uses, mutant):
            return reason
    if mutant.change == "a relaxed arrival" and not (news or {}).get(mutant.line, True):
        return "whoever waits for the arrival has learned from others all that it tells of"
    return ""


def _never_runs(lines: Sequence[str], uses: Uses, mutant: Mutant) -> str:
    """A line without any note: these sizes do not come to it."""
    watched = "flags_" not in mutant.statement.partition("(")[0]
    return (
        "" if mutant.line in uses or not watched else "the statement is not come to in these sizes"
    )


def _idle(lines: Sequence[str], uses: Uses, mutant: Mutant) -> str:
    if uses.get(mutant.line, True) or mutant.operation == "parity":
        return ""
    name = mutant.statement.partition("(")[0]
    if "mbarrier_init" in name and mutant.operation == "count":
        return "nobody waits for phases of the barrier"
    if "mbarrier_wait" in name:
        return "the phases that are waited for here are complete from the start"
    if "mbarrier_arrive" in name:
        return "nobody waits for the phases that are arrived at here"
    if "wgmma_fence" in name:
        return "no register was touched since the last fence that products use"
    if re.search("cta_sync|__syncthreads", name):
        return "no two threads touch the same bytes on either side of it before they meet again"
    if "wait_group" in name:
        return "all groups that are waited for here are over, or too few are under way"
    return ""


def _announced_late(lines: Sequence[str], uses: Uses, mutant: Mutant) -> str:
    copies = mutant.operation == "move" and "g2s" in mutant.change
    if copies and "expect_tx" in mutant.statement:
        return "a phase does not end before the arrival that announces its bytes"
    return ""


def _fenced_later(lines: Sequence[str], uses: Uses, mutant: Mutant) -> str:
    """No copy, product or release lies between the two places.

    Behind a meeting the thread that copies or multiplies has met the others, and fences then.
    """
    later = mutant.operation == "move" and mutant.change.startswith("behind")
    if "fence_proxy" not in mutant.statement or not later:
        return ""
    if _MEET.search(mutant.change):
        return "a proxy fence on either side of where threads meet is enough"
    if _WAIT.match(mutant.change):
        return "a proxy fence behind another wait follows all that it followed, and more"
    return ""


def _fenced_on_the_other_side(lines: Sequence[str], uses: Uses, mutant: Mutant) -> str:
    if mutant.operation not in ("weaken", "drop", "move") or not _loses_a_fence(mutant):
        return ""
    if re.search("flag|parts|global|fence_copies", mutant.statement):
        if _fences_flags(lines):
            return "a proxy fence lies on the other side of the flag"
        if _read_by_loads(lines):
            return (
                "copies that are over are visible to the ordinary loads that flags are raised for"
            )
    name = mutant.statement.partition("(")[0]
    for line in lines[mutant.line :]:
        if "fence_proxy" in line and line.split("(")[0].strip() == name:
            return "another proxy fence follows before a copy or a product"
        if re.search(
            r"tvm_builtin_ptx_(?:wgmma_\w+mma|cp_async_bulk_tensor|cp_async_bulk_s2c)", line
        ):
            return ""
    return ""


def _loses_a_fence(mutant: Mutant) -> bool:
    if mutant.change in ("no fence", "a fence of the other memory"):
        return True
    return bool(re.search(r"fence_proxy|fence_copies", mutant.statement))


def _fences_flags(lines: Sequence[str]) -> bool:
    """Whether a fence lies before every release of a flag, and one behind every wait for flags."""
    text = "\n".join(lines)
    sides = [each[0] for each in _FLAG_HELPERS.finditer(text)]
    return len(sides) > 1 and all("fence.proxy.async.global" in each for each in sides)


def _read_by_loads(lines: Sequence[str]) -> bool:
    """Whether those who wait for flags read what these tell of by ordinary loads alone.

    The completion of a bulk copy includes a proxy fence (PTX ISA, async proxy), and it is waited
    for before flags are raised.
    """
    names = {each["name"] for each in _FLAG_HELPERS.finditer("\n".join(lines))}
    return names == {"raise_flag", "await_parts"}


def _met_for_nothing(lines: Sequence[str], uses: Uses, mutant: Mutant) -> str:
    """One thread waits for its copies before threads meet, and there are none in these sizes."""
    if mutant.operation != "drop" or "bar_sync" not in mutant.statement:
        return ""
    for number in range(mutant.line - 1, 0, -1):
        line = lines[number - 1]
        if "bulk_wait_group" in line and not uses.get(number, True):
            return "what one thread waits for before threads meet is over already"
        if _TOUCHES.search(line):
            break
    return ""


def _met_already(lines: Sequence[str], uses: Uses, mutant: Mutant) -> str:
    """Threads meet twice, and nothing that others must know of lies between."""
    if mutant.operation != "drop" or not _MEET.search(mutant.statement):
        return ""
    for direction in (-1, 1):
        index = mutant.line - 1 + direction
        while 0 <= index < len(lines):
            line = lines[index].strip()
            if line == mutant.statement:
                return "threads have met just before or meet just after, and did nothing between"
            idle = not uses.get(index + 1, True)
            if (_TOUCHES.search(line) and not idle) or line.startswith(("for", "while", "} else")):
                break
            index += direction
    return ""


def _met_behind(lines: Sequence[str], mutant: Mutant) -> bool:
    """Whether threads meet behind a wait, and do nothing but wait in between."""
    if "mbarrier_wait" not in mutant.statement:
        return False
    indent = _indent(lines[mutant.line - 1])
    for line in lines[mutant.line :]:
        if line.strip() and _indent(line) < indent:
            indent = _indent(line)
            if not _closes_a_condition(lines[: mutant.line], line):
                return False
        if _MEET.search(line):
            return _indent(line) == indent
        if line.strip().startswith(("for", "while")) or "wgmma" in line:
            return False
        if _TOUCHES.search(line) and "cuda_mbarrier_wait" not in line:
            return False
    return False


def _closes_a_condition(before: Sequence[str], line: str) -> bool:
    """Whether a line ends a block that some condition opens, and no loop."""
    opened = next((each for each in reversed(before) if _indent(each) == _indent(line)), "")
    return line.strip().startswith("}") and opened.strip().startswith("if (")


def _met_in_a_product(lines: Sequence[str], uses: Uses, mutant: Mutant) -> str:
    """Who has waited for a product knows that its warpgroup had issued it, and was there so far."""
    if mutant.operation != "drop" or "bar_sync" not in mutant.statement:
        return ""
    indent = _indent(lines[mutant.line - 1])
    for line in reversed(lines[: mutant.line - 1]):
        if "wgmma_wait_group_wait_group_sync_aligned_0" in line and _indent(line) <= indent:
            return "threads have waited for a product that all issued, and touched nothing since"
        told = "mbarrier_arrive" in line
        if (
            "wgmma" in line
            or (_TOUCHES.search(line) and not told)
            or line.strip().startswith("for")
        ):
            break
    return ""


def _met_before_the_store(lines: Sequence[str], uses: Uses, mutant: Mutant) -> str:
    """All lanes read a word, which one of them writes behind another meeting."""
    before = _FLAG_READ.match(lines[mutant.line - 2])
    if mutant.operation != "drop" or "warp_sync" not in mutant.statement or not before:
        return ""
    indent, headers, none = _indent(lines[mutant.line - 1]), list[str](), False
    for line in lines[mutant.line :]:
        if not line.strip():
            continue
        depth = (_indent(line) - indent) // 2
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
    """Whether the lanes of a warp meet in a helper, whatever it is given."""
    helpers = _FLAG_HELPERS.finditer("\n".join(lines))
    return any(each["name"] == name and "\n  __syncwarp();" in each[0] for each in helpers)


def _awaited_by_one(lines: Sequence[str], uses: Uses, mutant: Mutant) -> str:
    """Of a wait for one flag the first lane alone learns, and it alone goes on to touch memory."""
    one = re.search(r"await_flags\w*\(.*, ready_ptr\[0\], 0, 1, ", mutant.statement)
    if mutant.change != "no __syncwarp" or not one:
        return ""
    start = next((n for n in range(mutant.line - 1, -1, -1) if _FLAG_READ.match(lines[n])), -1)
    if start < 0 or not re.search("warp_sync", lines[start + 1]):  # of other lanes' reads of flags
        return ""
    role, lane = _indent(lines[start]), 0
    for line in lines[start + 2 :]:
        if line.strip() and _indent(line) < role:
            return "the lane that waits for the flag learns of it, and alone touches memory then"
        if lane and line.strip() and _indent(line) <= lane:
            lane = 0
        touches = _TOUCHES.search(line) or "flags_" in line
        if not lane and touches and line.strip() != mutant.statement:
            return ""
        if not lane and _FIRST_LANE.match(line):
            lane = _indent(line)
    return ""


def _helps_in_the_end(lines: Sequence[str], uses: Uses, mutant: Mutant) -> str:
    """Flags that never come are what help is for: it makes all that they tell of."""
    if mutant.change == "a count more is awaited" and "_or_help(" in mutant.statement:
        return "a wait that flags do not end is ended by help, which orders as much"
    return ""


def _said_later(lines: Sequence[str], uses: Uses, mutant: Mutant) -> str:
    """Nothing hangs: an arrival tells of all before it, a wait orders all behind it."""
    if mutant.operation != "move":
        return ""
    name, later = mutant.statement.partition("(")[0], mutant.change.startswith("behind")
    if later and re.search("arrive|raise_flag", name):
        return "an arrival that comes later tells of more"
    if not later and re.search("mbarrier_wait|cluster_wait|await", name):
        return "a wait that comes earlier orders more"
    return ""


def _one_thread(lines: Sequence[str], uses: Uses, mutant: Mutant) -> str:
    """Since threads met last, one has waited for something, and it alone tells of it."""
    if mutant.operation != "drop" or not _MEET.search(mutant.statement):
        return ""
    before, met = _around(lines, mutant.line - 1, -1)
    after, _ = _around(lines, mutant.line - 1, 1)
    alone = met and _is_of_first(before[::-1]) and _is_of_first(after)
    if not alone or not any("arrive" in line for line in after):
        return ""
    return "one thread alone has waited since threads met, and alone tells of it"


def _around(lines: Sequence[str], index: int, step: int) -> tuple[list[str], bool]:
    """Lines up to the same statement or the end of its block; and whether there is one."""
    statement = lines[index]
    indent = _indent(statement)
    found: list[str] = []
    for line in lines[index + step :: step]:
        if line == statement:
            return found, True
        if line.strip() and _indent(line) < indent:
            return found, False
        found.append(line)
    return found, False


def _is_of_first(lines: Sequence[str]) -> bool:
    """Whether only the first thread of a warpgroup touches anything."""
    depth = 0
    for line in lines:
        if depth == 0 and _TOUCHES.search(line):
            return False
        if _FIRST.search(line) or depth:
            depth += line.count("{") - line.count("}")
    return True


def _alone(lines: Sequence[str], uses: Uses, mutant: Mutant) -> str:
    """Threads of a role that never reach into another CTA."""
    if mutant.change != "a relaxed arrival" or "barrier_cluster_arrive" not in mutant.statement:
        return ""
    index = mutant.line - 1
    indent = _indent(lines[index])
    for line in reversed(lines[:index]):
        if line.strip() and _indent(line) < indent:
            break
        if _PEERS.search(line):
            return ""
    return "threads of this role touch no other CTA"


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


Rule = Callable[[Sequence[str], Uses, Mutant], str]
_RULES: tuple[Rule, ...] = (
    _never_runs,
    _idle,
    _announced_late,
    _fenced_later,
    _fenced_on_the_other_side,
    _met_already,
    _met_for_nothing,
    _one_thread,
    _met_in_a_product,
    _met_before_the_store,
    _awaited_by_one,
    _helps_in_the_end,
    _said_later,
    _alone,
)
