"""Draws the CTAs of a cluster side by side, with their slabs of every exchanged buffer."""

from __future__ import annotations

from html import escape

from crossfuse.schedule.cluster_picture import ClusterLayout, Slabs, meaning

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
