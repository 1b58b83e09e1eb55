"""`view_page`: all about a schedule, on one page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from crossfuse.errors import RefusedError, WorkloadRefused, refuse
from crossfuse.hardware import Device, device
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
    return page(viewed.title, _sections(viewed, spec, [each.to_json() for each in kernels]))


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
    from crossfuse.view.times import timeline

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
    from crossfuse.view.cluster import cluster_html
    from crossfuse.view.lines import linked, schedule_lines
    from crossfuse.view.page import code_html, text_html

    found = {"Cluster": cluster_html(cluster_layout(sch))}
    try:
        cuda = lower(sch, target).image.cuda
    except RefusedError as error:
        found["Why there is no kernel"] = text_html(error)
        return found
    lines = schedule_lines(sch)
    found["Schedule and CUDA"] = code_html(lines, linked(lines, cuda))
    return found
