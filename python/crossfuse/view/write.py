"""`view_page`: all about a schedule, on one page."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.errors import PlanRefused, RefusedError, Rule, WorkloadRefused, refuse
from crossfuse.files import read_text
from crossfuse.hardware import Device, device
from crossfuse.planner.cost.terms import told
from crossfuse.planner.explain.picture import COLOURS, LINE, MARGIN, WIDTH, Page
from crossfuse.planner.families import EAGER
from crossfuse.schedule.cluster_layout import ClusterLayout, Slabs, meaning
from crossfuse.schema import Damaged, parse, typed

_view_refused = Rule(WorkloadRefused, "view")

# Reads what can be viewed: workloads, plans, candidates and traces, modules, schedules.


@dataclass(frozen=True)
class Viewed:
    """What a page shows."""

    title: str
    #: The ``tvm.s_tir.Schedule``; None where nothing of ours runs, or a plan does not say of which
    #: function it is.
    schedule: Any = None
    #: The explanation of its plan, with ``text`` and ``svg``; None without a plan.
    reasons: Any = None
    #: For a workload: what was planned, or why nothing was.
    choice: str = ""


def read_viewed(source: Any, target: Device, workload: str = "") -> Viewed:
    """Read what is to be shown, for planning on a target.

    A source is a schedule; a packaged id or the text of a spec; or a file: a plan
    (``Plan.to_json``, or what ``crossfuse explain --json`` printed), a candidate or the first of a
    list (also one that holds a trace), or a scheduled module, as TVM's JSON or as TVMScript
    (``.py``). For the plan of a chain `workload` is its spec. Anything else is refused, and so is a
    source without a plan or a schedule.
    """
    if not isinstance(source, (str, Path)):
        return Viewed("a schedule", source)
    path = Path(source)
    if path.suffix in (".json", ".jsonl", ".py"):
        return _from_file(path, target, workload)
    return _from_workload(str(source), target)


def _from_workload(text: str, target: Device) -> Viewed:
    """The kernel that `crossfuse.compile` builds, and why that one."""
    from crossfuse.compiler import read_source
    from crossfuse.compiler.compiled import choose
    from crossfuse.compiler.report import choice_text

    chosen = choose(read_source(text), target)
    plan = chosen.option.plan
    reasons = plan.explain(target) if plan is not None else None
    return Viewed(text, chosen.schedule, reasons, choice_text(chosen.why))


def _from_file(path: Path, target: Device, workload: str) -> Viewed:
    try:
        text = read_text(path)
    except Damaged as error:
        raise _refused(path, str(error)) from None
    if path.suffix == ".py":
        return Viewed(path.name, _module(_script(path, text)))
    value = _value(path, text)
    if isinstance(value, dict) and "root_index" in value:
        from crossfuse import _tvm as ir

        try:
            return Viewed(path.name, _module(ir.load_json(text, (ir.IRModule, ir.PrimFunc))))
        except Damaged as error:
            raise _refused(path, str(error)) from None
    if isinstance(value, dict) and ("plan" in value or "version" in value):
        return _from_plan(path, value.get("plan", value), workload)
    return _from_candidate(path, target)


def _value(path: Path, text: str) -> Any:
    try:
        # TVM writes infinities.
        return parse(text, finite=False) if path.suffix == ".json" else None
    except Damaged as error:
        raise _refused(path, str(error)) from None


def _script(path: Path, text: str) -> Any:
    from crossfuse import _tvm as ir

    try:
        return ir.tvm.script.from_source(text)
    except Exception as error:  # TVM's parser raises whatever it comes across.
        last = str(error).strip().splitlines()[-1:] or [type(error).__name__]
        raise _refused(path, last[0]) from error


def _module(value: Any) -> Any:
    """A scheduled module as a schedule without a trace."""
    from crossfuse import _tvm as ir
    from crossfuse.lower.extract import only_function

    return ir.Schedule(only_function(value))


def _from_plan(path: Path, value: Any, workload: str) -> Viewed:
    from crossfuse.planner.cascade.plan import CascadePlan
    from crossfuse.planner.plan import Plan

    kind = Plan if isinstance(value, dict) and "chain" in value else CascadePlan
    plan = kind.from_json(json.dumps(value))
    spec = workload or getattr(getattr(plan, "shape", None), "name", "")
    return Viewed(spec or path.name, _schedule_of(spec, plan), plan.explain())


def _schedule_of(spec: str, plan: Any) -> Any:
    """The schedule of a plan; None for a plan that does not fuse, or without a workload."""
    if plan.family == EAGER or not spec:
        return None
    from crossfuse.planner.plan import is_cascade

    if is_cascade(spec):
        from crossfuse.meta_schedule.candidate import function_of
        from crossfuse.schedule.planned import schedule_cascade_of
        from crossfuse.workload import cascades

        func = function_of(str(cascades.resolve_any(spec)))
        return schedule_cascade_of(func, plan.family, plan.tiles, constant_weights=True)
    from crossfuse.schedule.planned import schedule_workload

    return schedule_workload(spec, plan, constant_weights=True)


def _from_candidate(path: Path, target: Device) -> Viewed:
    from crossfuse.meta_schedule.candidate import read_candidates, schedule_candidate

    found = read_candidates(path)
    if not found:
        raise _refused(path, "no candidate")
    candidate = found[0]
    if candidate.family == EAGER:
        raise refuse(
            PlanRefused,
            "view",
            str(path),
            found="a candidate that is not ours, but PyTorch's",
            limit="a kernel of ours",
            instead="name a candidate of another family",
        )
    return Viewed(f"{candidate.spec}, {candidate.summary}", schedule_candidate(candidate, target))


def _refused(path: Path, found: str) -> RefusedError:
    return _view_refused(
        str(path),
        found=found,
        limit="a plan, a candidate with its trace or tiles, or a scheduled module, as JSON, or "
        "TVMScript",
        instead="write it by Plan.to_json, crossfuse explain --json or tvm.ir.save_json, or name a "
        "workload such as S3",
    )


# The page.


def page(title: str, sections: Mapping[str, str]) -> str:
    """Write a whole page, with its style and script inside.

    Sections are HTML by heading, in order; empty ones are left out.
    """
    here = files(__package__)
    shown = {heading: body for heading, body in sections.items() if body}
    body = "".join(
        f'<section id="{_name(heading)}"><h2>{escape(heading)}</h2>{inner}</section>'
        for heading, inner in shown.items()
    )
    links = " ".join(f'<a href="#{_name(each)}">{escape(each)}</a>' for each in shown)
    template = Template(here.joinpath("page.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=escape(title),
        style=here.joinpath("page.css").read_text(encoding="utf-8"),
        script=here.joinpath("page.js").read_text(encoding="utf-8"),
        links=links,
        body=body,
    )


def _name(heading: str) -> str:
    return heading.lower().replace(" ", "-")


def code_html(schedule: Sequence[ScheduleLine], cuda: CudaText) -> str:
    """Schedule and CUDA side by side.

    Lines are of class ``made`` and ``by``; the script marks those that belong together.
    """
    counts = [0] * len(schedule)
    for makers in cuda.made_by:
        for each in makers:
            counts[each] += 1
    left = "".join(
        f'<li data-line="{number}"{_dim(counts[number])} tabindex="0">'
        f"<code>{escape(line.text)}</code>{_count(counts[number])}</li>"
        for number, line in enumerate(schedule)
    )
    right = "".join(
        f'<li data-by="{" ".join(map(str, makers))}"><code>{escape(text) or " "}</code></li>'
        for text, makers in zip(cuda.lines, cuda.made_by, strict=True)
    )
    helpers = f"<pre>{escape(cuda.helpers)}</pre>"
    return (
        "<p>Choose a line of the schedule to see what became of it, or one of the CUDA to see what "
        "made it: lines that name its tensors and loops, or hold its instructions.</p>"
        f'<div class="code"><ol class="made">{left}</ol><ol class="by">{right}</ol></div>'
        f"<details><summary>functions around instructions</summary>{helpers}</details>"
    )


def _dim(count: int) -> str:
    return "" if count else ' class="none"'


def _count(count: int) -> str:
    return f"<small>{count}</small>" if count else ""


def text_html(value: Any) -> str:
    """Plain text with its line breaks."""
    return f"<pre>{escape(str(value))}</pre>"


# Draws the CTAs of a cluster side by side, with their slabs of every exchanged buffer.

#: Boxes of a row; of more CTAs the middle is left out.
_SHOWN = 16


def cluster_html(layout: ClusterLayout) -> str:
    """Draw a cluster as HTML: a row of boxes of class ``slab`` for each buffer.

    Where there is no cluster it is a sentence that says so.
    """
    if not layout.axes:
        return "<p>No clusters: CTAs exchange nothing.</p>"
    extents = " x ".join(f"{axis}={extent}" for axis, extent in layout.axes)
    rows = "".join(map(_in_table, layout.buffers))
    if not layout.buffers:
        rows = "<p>Its CTAs load tiles for each other; none holds a slab of a buffer.</p>"
    return f"<p>A cluster of {layout.size} CTAs ({extents}).</p>{rows}"


def _in_table(slabs: Slabs) -> str:
    shape = " x ".join(map(str, slabs.shape)) or "1"
    boxes = "".join(
        f'<div class="slab"><b>CTA {rank}</b><br>slab {rank}<br><small>{shape}</small></div>'
        for rank in range(min(slabs.count, _SHOWN))
    )
    rest = f"<span>and {slabs.count - _SHOWN} more</span>" if slabs.count > _SHOWN else ""
    made = f"made by {', '.join(slabs.writers)}; taken by {', '.join(slabs.readers)}"
    return (
        f"<h3>{escape(slabs.name)}: {slabs.size:,} bytes of {slabs.dtype} in a CTA</h3>"
        f"<p>{escape(made)}. {escape(meaning(slabs))}.</p>"
        f'<div class="slabs">{boxes}{rest}</div>'
    )


# Finds the line of a schedule that made a line of CUDA: by tensors, loops and instructions.
#
# A line of the schedule names blocks and loops; blocks write tensors, and loops have variables,
# whose names are in the generated text. Primitives that become instructions rather than names are
# found by these. What neither names (a reordering) has no line of its own.

#: What a part of a schedule's line says, and what of the CUDA comes of it.
_WORDS = (
    (re.compile(r"crossfuse\.cluster_axis"), ("cluster_ctaid", "clusterid", "cluster_dims")),
    (re.compile(r"crossfuse\.dsm_"), ("mapa", "barrier_cluster", "cluster_sync", "_dsm")),
    (re.compile(r'thread_axis="blockIdx'), ("blockIdx", "clusterid")),
    (re.compile(r'thread_axis="threadIdx'), ("threadIdx",)),
    (re.compile(r"crossfuse\.stages"), ("mbarrier", "stage_ptr", "parity_ptr")),
    (re.compile(r"crossfuse\.grid_stage"), ("flag",)),
)
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
_KERNEL = re.compile(r'extern "C" __global__')
#: A loop's variable that is too short to tell: `i` is in every kernel.
_SHORT = 2


@dataclass(frozen=True)
class ScheduleLine:
    """A line of a schedule, and how to recognise CUDA that comes of it."""

    #: As Python.
    text: str
    #: Tensors and loop variables that it is about, as the CUDA spells them.
    names: frozenset[str] = frozenset()
    #: Instructions that come of it.
    words: tuple[str, ...] = ()


def schedule_lines(sch: Any) -> tuple[ScheduleLine, ...]:
    """The trace of a schedule, a line for each instruction.

    Without a trace the lines are those of its function, without names.
    """
    instructions = list(sch.trace.insts) if sch.trace is not None else []
    if not instructions:
        return tuple(map(ScheduleLine, str(sch.mod.script()).splitlines()))
    # The first two lines are the import and the head of the function.
    texts = str(sch.trace).splitlines()[2:]
    return tuple(
        ScheduleLine(text.strip(), _names(sch, each), _words(text))
        for text, each in zip(texts, instructions, strict=True)
    )


def _words(text: str) -> tuple[str, ...]:
    return tuple(word for pattern, words in _WORDS if pattern.search(text) for word in words)


def _names(sch: Any, instruction: Any) -> frozenset[str]:
    """Names of what an instruction made, or of what it was applied to where it made nothing."""
    found = _tensors(sch, instruction.outputs) or _tensors(sch, instruction.inputs)
    return frozenset(found)


def _tensors(sch: Any, variables: Iterable[Any]) -> set[str]:
    names: set[str] = set()
    for each in variables:
        try:
            there = sch.get(each)
        except (ValueError, RuntimeError, TypeError, IndexError):
            continue  # Later lines have taken it away, or it is a number.
        if isinstance(there, ir.SBlock):
            names |= {_spelt(str(region.source.name)) for region in there.writes}
        elif isinstance(there, ir.For) and len(str(there.loop_var.name)) > _SHORT:
            names.add(_spelt(str(there.loop_var.name)))
    return names


def _spelt(name: str) -> str:
    return re.sub(r"\W", "_", name)


@dataclass(frozen=True)
class CudaText:
    """Generated CUDA, in helpers and kernels."""

    #: What stands before the kernels: functions around single instructions.
    helpers: str
    #: Of the kernels.
    lines: tuple[str, ...]
    #: For each of these, the numbers of the schedule's lines that made it.
    made_by: tuple[tuple[int, ...], ...]


def linked(schedule: Sequence[ScheduleLine], cuda: str) -> CudaText:
    """Find the lines of a schedule behind each line of its kernels."""
    first = _KERNEL.search(cuda)
    start = first.start() if first else 0
    lines = tuple(cuda[start:].splitlines())
    return CudaText(cuda[:start], lines, tuple(_makers(schedule, each) for each in lines))


def _makers(schedule: Sequence[ScheduleLine], text: str) -> tuple[int, ...]:
    identifiers = set(_IDENTIFIER.findall(text))
    return tuple(
        number
        for number, line in enumerate(schedule)
        if any(word in text for word in line.words)
        or any(_is(name, each) for name in line.names for each in identifiers)
    )


def _is(name: str, identifier: str) -> bool:
    """Whether an identifier of the CUDA is a tensor's, perhaps with a scope or number appended."""
    stem = re.sub(r"_(shared|local|dsm|dyn|global|rf).*$", "", name)
    return identifier in (name, stem) or identifier.startswith(f"{stem}_")


# `view_page`: all about a schedule, on one page.


def view_page(
    source: Any,
    target: str | Device | None = None,
    *,
    workload: str = "",
    measured: Sequence[Mapping[str, Any]] = (),
) -> str:
    """Show what a schedule becomes, as HTML that needs no other file and no network.

    For sources and `workload` see `crossfuse.view.write.read_viewed`; what has nothing to show is
    refused. `measured` are kernels of ``crossfuse timeline --json``, drawn on the scale of the
    estimate.

    Examples
    --------
    >>> "<html" in view_page("gated_ffn:M=16,K=64,N=128,L=64")
    True
    """
    from crossfuse.bench.timeline import KernelTimeline

    spec = device(target)
    try:
        given = typed(tuple[Mapping[str, Any], ...], measured)
        # What a page shows does without the gap to the kernel before.
        kernels = typed(tuple[KernelTimeline, ...], [{"gap": None, **each} for each in given])
    except Damaged as error:
        raise measured_refused("measured", error) from None
    viewed = read_viewed(source, spec, workload)
    return page(viewed.title, _sections(viewed, spec, [asdict(each) for each in kernels]))


def measured_refused(where: str, error: Damaged) -> RefusedError:
    """Build the refusal of a file that should hold time stamps of a GPU but does not."""
    return _view_refused(
        where,
        found=error.found,
        limit=f"{error.limit}, in kernels with events as crossfuse timeline --json prints them",
        instead="run crossfuse timeline WORKLOAD --json on a GPU, and keep what it prints",
    )


def _sections(
    viewed: Viewed, target: Device, measured: Sequence[Mapping[str, Any]]
) -> dict[str, str]:
    from crossfuse.view.write import text_html

    sections: dict[str, str] = {}
    terms: Mapping[str, float] = {}
    if viewed.reasons is not None:
        terms = viewed.reasons.plan.terms
        sections["Plan"] = viewed.reasons.svg()
    if terms or measured:
        sections["Timeline"] = timeline(terms, measured)
    if viewed.schedule is not None:
        sections |= _kernel(viewed.schedule, target)
    reasons = viewed.reasons.text() if viewed.reasons is not None else ""
    if reasons or viewed.choice:
        sections["Why this plan"] = text_html(f"{viewed.choice}\n\n{reasons}".strip())
    return sections


def _kernel(sch: Any, target: Device) -> dict[str, str]:
    from crossfuse.lower.extract import lower
    from crossfuse.schedule.cluster_layout import cluster_layout
    from crossfuse.view.write import cluster_html, code_html, linked, schedule_lines, text_html

    found = {"Cluster": cluster_html(cluster_layout(sch))}
    try:
        cuda = lower(sch, target).image.cuda
    except RefusedError as error:
        found["Why there is no kernel"] = text_html(error)
        return found
    lines = schedule_lines(sch)
    found["Schedule and CUDA"] = code_html(lines, linked(lines, cuda))
    return found


# Draws when things happen: the terms of an estimate one after another, time stamps below.

_LABEL, _BAR = 150, 14


def timeline(terms: Mapping[str, float], measured: Sequence[Mapping[str, Any]] = ()) -> str:
    """Draw estimated terms and measured events on one scale of time, as an SVG file.

    `terms` are microseconds by name, drawn one after another: what a stream adds to those above it,
    in the order of `crossfuse explain`; there may be none. `measured` are kernels of ``crossfuse
    timeline --json``: events with the microsecond of the first, the median and the last CTA that
    reached them. Boxes are of class ``step`` and ``event``.
    """
    page = Page()
    ends = [each["last"] for kernel in measured for each in kernel["events"]]
    whole = max([sum(each for each in terms.values() if each > 0), *ends, 1e-3])
    scale = (WIDTH - 2 * MARGIN - _LABEL - 60) / whole
    if terms:
        _steps(page, terms, scale)
    for number, kernel in enumerate(measured):
        _events(page, number, kernel, scale)
    return page.finished()


def _steps(page: Page, terms: Mapping[str, float], scale: float) -> None:
    page.heading(f"estimated, {sum(terms.values()):.2f} us: what each term adds")
    at = 0.0
    for number, name in enumerate(told(terms)):
        left, right = sorted((at, at + terms[name]))
        at += terms[name]
        _row(page, name, left, right, scale, "step", COLOURS[number % len(COLOURS)])
        page.text(_x(right, scale) + 4, page.y - LINE + _BAR - 3, f"{terms[name]:+.2f}")


def _events(page: Page, number: int, kernel: Mapping[str, Any], scale: float) -> None:
    page.heading(f"measured, {kernel['kernel']}: from the first CTA to the last, and the median")
    for each in kernel["events"]:
        words = f"{each['name']}, {each['ctas']} CTAs"
        top = page.y
        first, last, median = each["first"], each["last"], each["median"]
        _row(page, words, first, last, scale, "event", COLOURS[number % len(COLOURS)])
        at = (_x(median, scale) - 1, top, 2.0, float(_BAR))
        page.box(at, f"median {median:.2f} us", "median", fill="black")
        page.text(_x(last, scale) + 4, top + _BAR - 3, f"{median:.1f}")


def _row(
    page: Page, words: str, first: float, last: float, scale: float, kind: str, colour: str
) -> None:
    page.text(MARGIN, page.y + _BAR - 3, words, font_size="11")
    box = (_x(first, scale), page.y, max((last - first) * scale, 1.5), float(_BAR))
    page.box(box, f"{words}: {first:.2f} to {last:.2f} us", kind, fill=colour)
    page.y += LINE


def _x(time: float, scale: float) -> float:
    return MARGIN + _LABEL + time * scale
