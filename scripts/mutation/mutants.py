"""Mutants of a kernel's synchronisation: calls dropped, weakened, moved or with wrong counts.

All mutants of a kernel are one text, compiled once; an environment variable chooses one of them.
"""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from crossfuse.emulate.cuda.translate import arguments_of, closing
from crossfuse.lower.image import KernelImage


def indent_of(line: str) -> int:
    """Number of blanks before a line's first character."""
    return len(line) - len(line.lstrip())


# Mutations of a call that synchronises: weaker instructions in its helper, and other arguments.

#: Instructions of helpers, and weaker ones: a description, a pattern and what takes its place.
_WEAKER: tuple[tuple[str, str, str], ...] = (
    ("the scope of a wait is the CTA", r"(wait\.parity\.acquire)\.cluster", r"\1.cta"),
    ("a relaxed wait", r"(wait\.parity)\.acquire", r"\1.relaxed"),
    ("a relaxed arrival", r"(cluster\.arrive)\.release", r"\1.relaxed"),
    ("a relaxed arrival", r"(mbarrier\.arrive)(\.shared::cluster)", r"\1.relaxed.cluster\2"),
    ("a relaxed arrival", r"(mbarrier\.arrive)(\.shared\.)", r"\1.relaxed.cta\2"),
    ("a relaxed release", r"red\.release\.", r"red.relaxed."),
    ("a release to the CTA", r"red\.release\.gpu", r"red.release.cta"),
    ("a release to the cluster", r"red\.release\.gpu", r"red.release.cluster"),
    ("a relaxed acquire", r"ld\.acquire\.", r"ld.relaxed."),
    ("a relaxed release", r"st\.release\.sys", r"st.relaxed.sys"),
    ("a release to the GPU", r"(red|st)\.release\.sys", r"\1.release.gpu"),
    ("an acquire from the GPU", r"ld\.acquire\.sys", r"ld.acquire.gpu"),
    ("no __syncthreads", r"__syncthreads\(\);", ""),
    ("an acquire from the CTA", r"ld\.acquire\.gpu", r"ld.acquire.cta"),
    ("an acquire from the cluster", r"ld\.acquire\.gpu", r"ld.acquire.cluster"),
    ("a fence of the other memory", r"(fence\.proxy\.async)\.shared::cta", r"\1.global"),
    ("a fence of the other memory", r"(fence\.proxy\.async)\.global", r"\1.shared::cta"),
    ("no fence", r'asm volatile\("fence\.proxy\.async[^;]*;"[^;]*;', ""),
    ("no __syncwarp", r"__syncwarp\(\);", ""),
    ("a wait for reads alone", r"(cp\.async\.bulk\.wait_group) (?=\d)", r"\1.read "),
)
_GROUPS = re.compile(r"(wait_group(?:\.read|\.sync\.aligned)?) (\d+);")


def weaker(definition: str) -> Iterator[tuple[str, str]]:
    """Weaker forms of a helper's text: pairs of what is weaker, and the text."""
    for what, pattern, by in _WEAKER:
        changed, count = re.subn(pattern, by, definition, count=1)
        body = changed[changed.index("{") :]
        if count and re.sub(r"\s", "", body) != "{}":  # that is a call left out
            yield what, changed
    found = _GROUPS.search(definition)
    if found:
        more = f"{found[1]} {int(found[2]) + 1};"
        yield (
            "a group more may be under way",
            definition[: found.start()] + more + definition[found.end() :],
        )


#: By what the name of a call contains: arguments that are changed, and to what.
ARGUMENTS: tuple[tuple[str, int, str, str, str], ...] = (
    ("cuda_mbarrier_wait", 0, "(void*)((char*){} + 8)", "place", "the barrier beside it"),
    ("ptx_mbarrier_arrive", 0, "{} + 8", "place", "the barrier beside it"),
    ("cuda_mbarrier_wait", 1, "{} ^ 1", "parity", "the other parity"),
    ("expect_tx", 1, "{} + 16", "count", "16 bytes more"),
    ("expect_tx", 1, "{} - 16", "count", "16 bytes less"),
    ("mbarrier_init_init", 1, "{} + 1", "count", "an arrival more is expected"),
    ("mbarrier_init_init", 1, "{} - 1", "count", "an arrival less is expected"),
    ("mbarrier_arrive_arrive", 1, "{} + 1", "count", "an arrival more"),
    ("ptx_bar_", 1, "{} + 32", "count", "a warp more is expected"),
    ("ptx_bar_", 1, "{} - 32", "count", "a warp less is expected"),
    ("ptx_bar_", 0, "{} + (threadIdx.x >> 5 & 1) * 7", "count", "another barrier, for odd warps"),
    ("crossfuse_await_ranks", 2, "{} - 1", "count", "a rank less is awaited"),
    ("crossfuse_arrive_at_ranks", 2, "{} - 1", "count", "a rank less is told"),
    ("crossfuse_exchange_with_ranks", 2, "{} - 1", "count", "a rank less is told and awaited"),
    ("crossfuse_exchange_with_ranks", 4, "{} + 1", "count", "a turn more is told and awaited"),
    ("crossfuse_exchange_with_ranks", 4, "{} - 1", "count", "a turn less is told and awaited"),
    ("_ranks", 1, "0", "place", "as rank 0"),
    ("crossfuse_await_flags", 2, "{} - 1", "count", "a flag less is awaited"),
    ("crossfuse_await_flags", 4, "{} - 1", "count", "a count less is awaited"),
    ("crossfuse_await_flags", 4, "{} + 1", "count", "a count more is awaited"),
)


#: Of helpers that issue copies: the parameter that is the barrier which counts their bytes.
_COUNTED_BY = re.compile(r"\b__mbar\b")


def barrier_position(definition: str) -> int | None:
    """Position of a copy's argument that is the barrier counting its bytes; None without one.

    The definition is that of the helper that issues the copy.
    """
    parameters = definition.partition("(")[2].partition(")")[0].split(",")
    return next((i for i, each in enumerate(parameters) if _COUNTED_BY.search(each)), None)


#: Calls that tell others of something, once: what they do twice tells them too early.
TOLD_TWICE = re.compile(r"ptx_mbarrier_arrive|raise_flag")
#: Calls that one thread of several may not make for the others: what each knows or has done itself.
BY_ALL = re.compile(r"fence_proxy|cuda_mbarrier_wait|griddepcontrol_wait")


#: Number of the mutant that runs; 0 is the right kernel.
VARIABLE = "CROSSFUSE_MUTANT"

_HEADER = f"""\
#include <cstdlib>
static const int crossfuse_mutant = getenv("{VARIABLE}") ? atoi(getenv("{VARIABLE}")) : 0;
"""
#: Calls that synchronise, as generated text names them.
_CALLS = re.compile(
    r"^\s*(?:(?P<target>[\w\[\]]+) = )?(?P<name>(?:tvm_builtin_(?:cuda|ptx)_"
    r"(?:mbarrier|fence|bar|barrier|wgmma_(?:fence|commit|wait)|cp_async_bulk_(?:wait|commit)|cta_sync|warp_sync|"
    r"griddepcontrol_wait)\w*)|crossfuse_(?:raise_flag|fence_copies|await\w*|arrive\w*|exchange_with\w*|turn_of\w*|watch|"
    r"cluster_sync)|"
    r"__syncthreads|__syncwarp)\((?P<arguments>.*)\);\s*$"
)
#: What runs beside the threads, or what others see: what a call that synchronises is moved past.
_OPERATIONS = re.compile(
    r"tvm_builtin_ptx_(?:wgmma|cp_|st_|ld_|stmatrix|red_)|crossfuse_dsm_|memory_ptr|peer_ptr|flags_\w+\["
)
#: Copies whose bytes a barrier counts.
_COPIES = re.compile(
    r"^\s*(?P<name>tvm_builtin_ptx_(?:cp_async_bulk|st_async)\w*mbarrier\w*)\(.*\);\s*$"
)
#: The header of a block of one thread of a warp, or of none that has others beside it.
_OF_ONE = re.compile(r"threadIdx\.x\) (?:% (?:32|128)|& (?:31|127))\)+ (?:== \d+|< 1)\b")
_FLAG_COUNT = re.compile(r"^\s*crossfuse_flags_\w+\[.*\] = \(launches_before \+ .*\);\s*$")


@dataclass(frozen=True)
class Mutant:
    """One change of a kernel's synchronisation."""

    #: The value of `VARIABLE` that chooses it.
    number: int
    #: ``"drop"``, ``"weaken"``, ``"count"``, ``"parity"``, ``"place"``, ``"twice"``, ``"part"`` or
    #: ``"move"``.
    operation: str
    #: In the right text.
    line: int
    statement: str
    #: In words, what stands there instead.
    change: str

    def __str__(self) -> str:
        return f"{self.operation} in line {self.line} `{self.statement}`: {self.change}"


@dataclass(frozen=True)
class Mutated:
    """A kernel with all its mutants, in the order of their lines."""

    #: One text of all mutants.
    image: KernelImage
    mutants: tuple[Mutant, ...]
    #: Of the right text.
    lines: tuple[str, ...]
    #: Lines by which the kernel begins later in the text of all mutants.
    shift: int


@dataclass(frozen=True)
class _Call:
    """A statement that synchronises."""

    name: str
    text: str
    arguments: tuple[str, ...]
    target: str = ""

    def with_argument(self, position: int, by: str) -> str:
        arguments = list(self.arguments)
        arguments[position] = by.format(f"({arguments[position].strip()})")
        return self.with_name(self.name, arguments)

    def with_name(self, name: str, arguments: Sequence[str] | None = None) -> str:
        given = ",".join(self.arguments if arguments is None else arguments)
        return f"{self.target and self.target + ' = '}{name}({given});"


@dataclass
class _Line:
    """A line of the kernel, with each mutant's text in place of it, before it and after it."""

    instead: dict[int, str] = field(default_factory=dict)
    before: dict[int, str] = field(default_factory=dict)
    after: dict[int, str] = field(default_factory=dict)

    def render(self, text: str) -> str:
        cases = "".join(
            f"if (crossfuse_mutant == {n}) {{ {by} }} else " for n, by in self.instead.items()
        )
        parts = [f"if (crossfuse_mutant == {n}) {{ {by} }}" for n, by in self.before.items()]
        parts.append(f"{cases}{{ {text.strip()} }}" if cases else text.strip())
        parts += [f"if (crossfuse_mutant == {n}) {{ {by} }}" for n, by in self.after.items()]
        return " ".join(parts)


def mutate(image: KernelImage) -> Mutated:
    """Find the mutants of a right kernel, and write them as one text.

    Examples
    --------
    >>> from crossfuse.lower.extract import lower
    >>> from crossfuse.schedule.rules.threads import schedule_split_k
    >>> from crossfuse.workload import parse, prim_func
    >>> image = lower(schedule_split_k(prim_func(parse("gemm:M=16,K=64,N=16")), cluster=4)).image
    >>> [each.operation for each in mutate(image).mutants[:2]]
    ['drop', 'drop']
    """
    return _Mutation(image).result()


class _Mutation:
    """Collector of an image's mutants."""

    def __init__(self, image: KernelImage) -> None:
        self.image = image
        self.lines = image.cuda.splitlines()
        self.changed: dict[int, _Line] = defaultdict(_Line)
        self.mutants: list[Mutant] = []
        self.copies: dict[str, str] = {}  # of helpers: the text by the name of the weaker one
        self.weaker: dict[str, list[tuple[str, str]]] = {}  # what is weaker, and its name

    def result(self) -> Mutated:
        for first, last in _bodies(self.image.cuda):
            for index in range(first, last):
                self._mutate_line(index, range(first, last))
        text = [
            self.changed[index].render(line) if index in self.changed else line
            for index, line in enumerate(self.lines)
        ]
        first = next(i for i, line in enumerate(self.lines) if "__global__" in line)
        copies = "\n".join(self.copies.values())
        text.insert(first, copies)
        cuda = _HEADER + "\n".join(text) + "\n"
        image = dataclasses.replace(self.image, cuda=cuda)
        shift = _HEADER.count("\n") + copies.count("\n") + 1
        return Mutated(image, tuple(self.mutants), tuple(self.lines), shift)

    def _mutate_line(self, index: int, body: range) -> None:
        line = self.lines[index]
        if _FLAG_COUNT.match(line):
            self._instead(index, "drop", "launches are not counted", "")
        found = _call(line)
        if found is None:
            return self._aim(index)
        self._drop(index, found)
        if TOLD_TWICE.search(found.name):
            self._instead(index, "twice", "done twice", f"{found.text} {found.text}")
        if BY_ALL.search(found.name) and not self._is_of_one(index):
            by = f"if (threadIdx.x % 32 == 0) {{ {found.text} }}"
            self._instead(index, "part", "left out by all but one thread of a warp", by)
        for part, position, by, operation, what in ARGUMENTS:
            if part in found.name and len(found.arguments) > position:
                self._instead(index, operation, what, found.with_argument(position, by))
        for what, name in self._weaker_helpers(found.name):
            self._instead(index, "weaken", what, found.with_name(name))
        for other in (index - 1, index + 1):
            if other in body:
                self._move(index, other)

    def _aim(self, index: int) -> None:
        """Let a neighbouring barrier count the bytes of a copy."""
        copy = _COPIES.match(self.lines[index])
        position = copy and barrier_position(_definition(self.image.cuda, copy["name"]))
        if copy is None or position is None:
            return
        by = _parsed(self.lines[index], copy["name"]).with_argument(position, "{} + 8")
        self._instead(index, "place", "the barrier beside it counts the bytes", by)

    def _is_of_one(self, index: int) -> bool:
        """Whether a line is inside a block that one thread runs alone."""
        indent = indent_of(self.lines[index])
        for line in reversed(self.lines[:index]):
            if line.strip() and indent_of(line) < indent:
                indent = indent_of(line)
                if _OF_ONE.search(line):
                    return True
        return False

    def _drop(self, index: int, call: _Call) -> None:
        by = f"{call.target} = 0;" if call.target else ""
        if "await_flags" in call.name:
            by = f"{call.target} = ({call.arguments[2]}) + 1;"
        self._instead(index, "drop", "left out", by)

    def _move(self, index: int, other: int) -> None:
        line, neighbour = self.lines[index].strip(), self.lines[other].strip()
        simple = neighbour.endswith(";") and not re.match(
            r"(?:alignas|\w+\*? \w+ =|\w+ \w+;|break)", neighbour
        )
        call = _call(neighbour)
        if not simple or not (call or _OPERATIONS.search(neighbour)) or neighbour == line:
            return
        own = _call(line)
        if call and own and (other < index or _kind(call) == _kind(own)):
            return  # exchanged from the other side, or as good as before
        later = other > index
        number = self._note(index, "move", f"{'behind' if later else 'before'} `{neighbour[:90]}`")
        self.changed[index].instead[number] = ""
        place = self.changed[other].after if later else self.changed[other].before
        place[number] = line

    def _instead(self, index: int, operation: str, what: str, by: str) -> None:
        self.changed[index].instead[self._note(index, operation, what)] = by

    def _note(self, index: int, operation: str, change: str) -> int:
        number = len(self.mutants) + 1
        statement = self.lines[index].strip()
        self.mutants.append(Mutant(number, operation, index + 1, statement, change))
        return number

    def _weaker_helpers(self, name: str) -> list[tuple[str, str]]:
        """Pairs of what is weaker, and the name of the weaker copy of a helper."""
        if name not in self.weaker:
            definition = _definition(self.image.cuda, name)
            self.weaker[name] = []
            for number, (what, text) in enumerate(weaker(definition)):
                copy = f"{name}_weaker_{number}"
                self.copies[copy] = re.sub(rf"\b{name}\b", copy, text)
                self.weaker[name].append((what, copy))
        return self.weaker[name]


def _bodies(text: str) -> Iterator[tuple[int, int]]:
    """First and last line of each kernel's body."""
    for kernel in re.finditer(r"__global__[^;{]*\{", text):
        end = closing(text, kernel.end() - 1)
        yield text.count("\n", 0, kernel.end()) + 1, text.count("\n", 0, end)


def _call(line: str) -> _Call | None:
    found = _CALLS.match(line)
    return _parsed(line, found["name"], found["target"] or "") if found else None


def _parsed(line: str, name: str, target: str = "") -> _Call:
    text = line.strip()
    spans = arguments_of(text, text.index(name), len(text) - 1)
    arguments = tuple(text[a:b] for a, b in spans)
    return _Call(name, text, () if arguments == ("",) else arguments, target)


def _kind(call: _Call) -> str:
    """The instruction of a call, whatever its variant."""
    return "_".join(call.name.split("_")[:5])


def _definition(text: str, name: str) -> str:
    """Text of a helper; empty braces if the language itself defines it."""
    found = re.search(rf"^[^\n;]*\b{name}\s*\([^;{{]*\)\s*\{{", text, re.MULTILINE)
    return text[found.start() : closing(text, found.end() - 1) + 1] if found else "{}"
