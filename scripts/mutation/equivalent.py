"""Mutants that are no faults, recognised by rules about the text and about what ran.

A rule is about one kind of mutants, of any kernel. Whether a statement had anything to do is what
the runtime noted of the right kernel, with the same inputs: a wait for a phase that is complete
from the start, a fence behind which nothing was touched, or a line that is never reached in these
sizes may be left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from mutation.equivalent_flags import (
    TOUCHES,
    Uses,
    awaited_by_one,
    fences_flags,
    helps_in_the_end,
    met_before_the_store,
    read_by_loads,
    tells_of_loads,
)
from mutation.mutants import Mutant, indent_of

_MEET = re.compile(r"bar_sync|cta_sync|warp_sync|__syncthreads|__syncwarp")
#: Statements that do nothing but wait: nothing is issued and nobody is told of anything by them.
_WAIT = re.compile(r"behind `\w*(?:mbarrier_wait|bulk_wait|wgmma_wait)\w*\(")
_PEERS = re.compile(r"shared__cluster_b64|st_async|crossfuse_dsm_|mapa")
#: Of the first thread of a warpgroup alone.
_FIRST = re.compile(r"^\s*if \(.*(?:% 128\) == 0\)|& 127\) < 1\)) \{$")


#: Of a mutant of groups, if the runtime has noted the same guarantees as of the right kernel: all
#: that groups do is end what their thread waits for, and others know of that by releases alone.
#: What the thread itself does too early, the runtime names.
TELLS_THE_SAME = "all that others learn of tells of the same copies and products"
_GROUP = re.compile(r"wgmma_(?:wait|commit)|cp_async_bulk_(?:wait|commit)")


def is_of_groups(mutant: Mutant) -> bool:
    """Whether a mutant changes which copies or products a thread waits for, and nothing else."""
    return bool(_GROUP.search(mutant.statement.partition("(")[0]))


def reason_of(lines: Sequence[str], uses: Uses, mutant: Mutant, news: Uses | None = None) -> str:
    """Why a mutant in which nothing was found is no fault; empty if no rule says so.

    `lines` are the right text's, and `uses` says which of its statements had something to do.
    `news` says of arrivals whether a thread that waits for them learns anything.
    """
    if mutant.operation == "part" and _met_behind(lines, mutant):
        return "who waits meets the others before anything is touched"
    if mutant.operation == "part":  # what nobody needs to do, some need not do either
        mutant = replace(mutant, operation="drop", change="left out")
    for rule in _RULES:
        if reason := rule(lines, uses, mutant):
            return reason
    learned = (news or {}).get(mutant.line, True)
    elsewhere = mutant.operation in ("parity", "place")
    if "mbarrier_wait" in mutant.statement and not learned and not elsewhere:
        return "the phase is known to be over already, and so is all that it tells of"
    if mutant.change == "a relaxed arrival" and not learned:
        return "whoever waits for the arrival has learned from others all that it tells of"
    return ""


def _never_runs(lines: Sequence[str], uses: Uses, mutant: Mutant) -> str:
    """A line without any note is never reached in these sizes."""
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
    """A fence may move later if no copy, product or release lies between the two places.

    After a meeting, the thread that copies or multiplies has met the others, and fences then.
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
        if fences_flags(lines):
            return "a proxy fence lies on the other side of the flag"
        if read_by_loads(lines):
            return (
                "copies that are over are visible to the ordinary loads that flags are raised for"
            )
    name = mutant.statement.partition("(")[0]
    for line in lines[mutant.line :]:
        if "fence_proxy" in line and line.split("(")[0].strip() == name:
            return "another proxy fence follows before a copy or a product"
        if re.search(r"tvm_builtin_ptx_(?:wgmma_\w+mma|cp_async_bulk_tensor)", line):
            return ""
    return ""


def _loses_a_fence(mutant: Mutant) -> bool:
    if mutant.change in ("no fence", "a fence of the other memory"):
        return True
    return bool(re.search(r"fence_proxy|fence_copies", mutant.statement))


def _read_later(lines: Sequence[str], uses: Uses, mutant: Mutant) -> str:
    """Boxes are waited for at the end of a phase, and again before the next one fills them."""
    name = mutant.statement.partition("(")[0].strip()
    if mutant.operation not in ("drop", "weaken") or "bulk_wait_group" not in name:
        return ""
    for line in lines[mutant.line :]:
        if line.split("(")[0].strip() == name:
            return "another wait for the same copies follows before boxes are filled again"
        if re.search(r"stmatrix|cp_async_bulk_tensor_s2g|memory_ptr\[.*\] = ", line):
            return ""
    return ""


def _met_for_nothing(lines: Sequence[str], uses: Uses, mutant: Mutant) -> str:
    """Threads meet after one has waited for its copies, but in these sizes there are none."""
    if mutant.operation != "drop" or "bar_sync" not in mutant.statement:
        return ""
    for number in range(mutant.line - 1, 0, -1):
        line = lines[number - 1]
        if "bulk_wait_group" in line and not uses.get(number, True):
            return "what one thread waits for before threads meet is over already"
        if TOUCHES.search(line):
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
            if (TOUCHES.search(line) and not idle) or line.startswith(("for", "while", "} else")):
                break
            index += direction
    return ""


def _met_behind(lines: Sequence[str], mutant: Mutant) -> bool:
    """Whether threads meet after a wait, and do nothing but wait in between."""
    if "mbarrier_wait" not in mutant.statement:
        return False
    indent = indent_of(lines[mutant.line - 1])
    for line in lines[mutant.line :]:
        if line.strip() and indent_of(line) < indent:
            indent = indent_of(line)
            if not _closes_a_condition(lines[: mutant.line], line):
                return False
        if _MEET.search(line):
            return indent_of(line) == indent
        if line.strip().startswith(("for", "while")) or "wgmma" in line:
            return False
        if TOUCHES.search(line) and "cuda_mbarrier_wait" not in line:
            return False
    return False


def _closes_a_condition(before: Sequence[str], line: str) -> bool:
    """Whether a line ends a block that some condition opens, and no loop."""
    opened = next((each for each in reversed(before) if indent_of(each) == indent_of(line)), "")
    return line.strip().startswith("}") and opened.strip().startswith("if (")


def _met_in_a_product(lines: Sequence[str], uses: Uses, mutant: Mutant) -> str:
    """A thread that has waited for a product knows that its whole warpgroup had got as far.

    The product could not have been issued otherwise.
    """
    if mutant.operation != "drop" or "bar_sync" not in mutant.statement:
        return ""
    indent = indent_of(lines[mutant.line - 1])
    for line in reversed(lines[: mutant.line - 1]):
        if "wgmma_wait_group_wait_group_sync_aligned_0" in line and indent_of(line) <= indent:
            return "threads have waited for a product that all issued, and touched nothing since"
        told = "mbarrier_arrive" in line
        if "wgmma" in line or (TOUCHES.search(line) and not told) or line.strip().startswith("for"):
            break
    return ""


def _announced_in_its_phase(lines: Sequence[str], uses: Uses, mutant: Mutant) -> str:
    """The bytes are known to be announced in their own phase.

    The runtime reports an arrival if nothing says that the phase before it is over.
    """
    announces = mutant.operation == "move" and re.match(r"behind `\w*expect_tx", mutant.change)
    if announces and "cuda_mbarrier_wait" in mutant.statement:
        return (
            "bytes are announced in a phase that is known to be theirs, and copied behind the wait"
        )
    return ""


def _said_later(lines: Sequence[str], uses: Uses, mutant: Mutant) -> str:
    """A later arrival covers all before it, an earlier wait orders all after it; none can hang."""
    if mutant.operation != "move":
        return ""
    name, later = mutant.statement.partition("(")[0], mutant.change.startswith("behind")
    if later and re.search("arrive|raise_flag", name):
        return "an arrival that comes later tells of more"
    if not later and re.search("mbarrier_wait|cluster_wait|await", name):
        return "a wait that comes earlier orders more"
    return ""


def _one_thread(lines: Sequence[str], uses: Uses, mutant: Mutant) -> str:
    """Since the last meeting one thread has waited for something, and it alone announces it."""
    if mutant.operation != "drop" or not _MEET.search(mutant.statement):
        return ""
    before, met = _around(lines, mutant.line - 1, -1)
    after, _ = _around(lines, mutant.line - 1, 1)
    alone = met and _is_of_first(before[::-1]) and _is_of_first(after)
    if not alone or not any("arrive" in line for line in after):
        return ""
    return "one thread alone has waited since threads met, and alone tells of it"


def _around(lines: Sequence[str], index: int, step: int) -> tuple[list[str], bool]:
    """Lines up to the same statement or the end of its block, and whether the statement recurs."""
    statement = lines[index]
    indent = indent_of(statement)
    found: list[str] = []
    for line in lines[index + step :: step]:
        if line == statement:
            return found, True
        if line.strip() and indent_of(line) < indent:
            return found, False
        found.append(line)
    return found, False


def _is_of_first(lines: Sequence[str]) -> bool:
    """Whether only the first thread of a warpgroup touches anything in these lines."""
    depth = 0
    for line in lines:
        if depth == 0 and TOUCHES.search(line):
            return False
        if _FIRST.search(line) or depth:
            depth += line.count("{") - line.count("}")
    return True


def _alone(lines: Sequence[str], uses: Uses, mutant: Mutant) -> str:
    """Threads of a role that never access another CTA."""
    if mutant.change != "a relaxed arrival" or "barrier_cluster_arrive" not in mutant.statement:
        return ""
    index = mutant.line - 1
    indent = indent_of(lines[index])
    for line in reversed(lines[:index]):
        if line.strip() and indent_of(line) < indent:
            break
        if _PEERS.search(line):
            return ""
    return "threads of this role touch no other CTA"


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
    met_before_the_store,
    awaited_by_one,
    _announced_in_its_phase,
    helps_in_the_end,
    _said_later,
    _alone,
    _read_later,
    tells_of_loads,
)
