"""`view_page`: all about a schedule, on one page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from crossfuse.errors import RefusedError, WorkloadRefused, refuse
from crossfuse.hardware import Device, device
from crossfuse.planner.cost.terms import told
from crossfuse.planner.explain.picture import COLOURS, LINE, MARGIN, WIDTH, Page
from crossfuse.schema import Damaged, typed
from crossfuse.view.sources import Viewed, read_viewed


def view_page(
    source: Any,
    target: str | Device | None = None,
    *,
    workload: str = "",
    measured: Sequence[Mapping[str, Any]] = (),
) -> str:
    """Show what a schedule becomes, as HTML that needs no other file and no network.

    For sources and `workload` see `crossfuse.view.sources.read_viewed`; what has nothing to show is
    refused. `measured` are kernels of ``crossfuse timeline --json``, drawn on the scale of the
    estimate.

    Examples
    --------
    >>> "<html" in view_page("gated_ffn:M=16,K=64,N=128,L=64")
    True
    """
    from crossfuse.bench.timeline import KernelTimeline
    from crossfuse.view.page import page

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
    return refuse(
        WorkloadRefused,
        "view",
        where,
        found=error.found,
        limit=f"{error.limit}, in kernels with events as crossfuse timeline --json prints them",
        instead="run crossfuse timeline WORKLOAD --json on a GPU, and keep what it prints",
    )


def _sections(
    viewed: Viewed, target: Device, measured: Sequence[Mapping[str, Any]]
) -> dict[str, str]:
    from crossfuse.view.page import text_html

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
    from crossfuse.view.lines import linked, schedule_lines
    from crossfuse.view.page import cluster_html, code_html, text_html

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
