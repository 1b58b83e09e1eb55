"""Draws when things happen: the terms of an estimate one after another, time stamps below."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from crossfuse.planner.cost.terms import told
from crossfuse.planner.explain.picture import COLOURS, LINE, MARGIN, WIDTH, Page

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
