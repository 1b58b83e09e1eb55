"""Assembles a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from crossfuse.schedule.cluster_layout import ClusterLayout, Slabs, meaning
from crossfuse.view.lines import CudaText, ScheduleLine


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
    rows = "".join(map(_row, layout.buffers))
    if not layout.buffers:
        rows = "<p>Its CTAs load tiles for each other; none holds a slab of a buffer.</p>"
    return f"<p>A cluster of {layout.size} CTAs ({extents}).</p>{rows}"


def _row(slabs: Slabs) -> str:
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
