"""An explanation as SVG: times by level, terms on one bar, and the shares of a cluster's CTAs.

Written as a tree of elements, so that it is well-formed and can be read back by tests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from crossfuse.planner.cost.terms import told
from crossfuse.planner.explain.levels import Level, Range, Share
from crossfuse.planner.explain.tables import by_tile, range_text

if TYPE_CHECKING:
    from crossfuse.planner.cascade.plan import CascadePlan
    from crossfuse.planner.choice import Plan
    from crossfuse.planner.explain.explanation import Explanation

WIDTH, MARGIN, LINE = 760, 16, 22
#: Colours that differ in lightness too, after Okabe and Ito.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#999999", "#f0e442")


class Page:
    """An SVG picture that is filled from the top down; `y` is where the next line begins."""

    def __init__(self) -> None:
        self.root = ElementTree.Element(
            "svg",
            {"xmlns": "http://www.w3.org/2000/svg", "font-family": "sans-serif", "font-size": "12"},
        )
        self.y = float(MARGIN)

    def text(self, x: float, y: float, words: str, **style: str) -> None:
        """Write words, their baseline at a place."""
        place = {"x": f"{x:g}", "y": f"{y:g}"}
        found = ElementTree.SubElement(self.root, "text", {**place, **_named(style)})
        found.text = words

    def box(
        self, box: tuple[float, float, float, float], title: str, kind: str, **style: str
    ) -> None:
        """Draw a rectangle (left, top, width, height) with a title as tooltip."""
        names = zip(("x", "y", "width", "height"), box, strict=True)
        place = {name: f"{each:.1f}" for name, each in names}
        found = ElementTree.SubElement(self.root, "rect", {**place, "class": kind, **_named(style)})
        ElementTree.SubElement(found, "title").text = title

    def heading(self, words: str) -> None:
        """Begin a part below what there is."""
        self.y += LINE
        self.text(MARGIN, self.y, words, font_weight="bold")
        self.y += 10

    def finished(self) -> str:
        """Write the text of an SVG file."""
        height = self.y + MARGIN
        self.root.set("viewBox", f"0 0 {WIDTH} {height:g}")
        self.root.set("width", str(WIDTH))
        self.root.set("height", f"{height:g}")
        ElementTree.indent(self.root, " ")
        return ElementTree.tostring(self.root, encoding="unicode") + "\n"


def _named(style: dict[str, str]) -> dict[str, str]:
    return {name.replace("_", "-"): each for name, each in style.items()}


_LABEL, _BAR = 90, 16
_CELL_HEIGHT = 46
#: Width of a letter of the smallest text, about.
_LETTER = 5.5


def picture(reasons: Explanation) -> str:
    """Draw an explanation as SVG text.

    Bars have class ``level`` or ``term``, tiles class ``tile``; each has a title with its numbers,
    which tests read.
    """
    plan = reasons.plan
    page = _page(plan, reasons.levels)
    for phase in sorted({each.phase for each in reasons.layout}):
        name = plan.chain.products[phase].output
        _tiles(page, reasons.layout, phase, name)
    return page.finished()


def times_picture(plan: Plan | CascadePlan, levels: Sequence[Level]) -> str:
    """Draw the levels and terms of a plan as SVG text."""
    return _page(plan, levels).finished()


def _page(plan: Plan | CascadePlan, levels: Sequence[Level]) -> Page:
    """Make a page with a title, levels and terms."""
    page = Page()
    time = f"{plan.microseconds:.2f} us estimated, bound by {plan.bound}"
    page.text(MARGIN, page.y + 4, f"{plan.family} on {plan.device}: {time}", font_size="15")
    page.y += 8
    _levels(page, levels, plan.microseconds)
    _terms(page, plan.terms)
    return page


def _levels(page: Page, levels: Sequence[Level], total: float) -> None:
    """Draw a bar for the time of each level alone, and a line where the estimate ends."""
    page.heading("each level alone, us; the line is the whole estimate")
    known = [each for each in levels if each.microseconds is not None]
    longest = max(total, *(each.microseconds or 0.0 for each in known))
    scale = (WIDTH - 2 * MARGIN - _LABEL - 170) / longest
    top, left = page.y, MARGIN + _LABEL
    for each in known:
        time = each.microseconds or 0.0
        page.text(MARGIN, page.y + _BAR - 4, each.name)
        page.box(
            (left, page.y, time * scale, _BAR),
            f"{each.name}: {each.text}, {time:.2f} us",
            "level",
            fill=COLOURS[0],
        )
        beside = left + total * scale if time * scale < total * scale else left + time * scale
        page.text(beside + 6, page.y + _BAR - 4, f"{time:.2f} us, {each.text}")
        page.y += LINE
    x = f"{left + total * scale:.1f}"
    ends = {"x1": x, "x2": x, "y1": f"{top - 4:g}", "y2": f"{page.y:g}"}
    ElementTree.SubElement(page.root, "line", {**ends, "stroke": "black", "class": "total"})


def _terms(page: Page, terms: Mapping[str, float]) -> None:
    """Draw all terms on one bar, and a legend; what was learned may take back from the others."""
    page.heading("terms of the estimate, us")
    scale = (WIDTH - 2 * MARGIN) / sum(each for each in terms.values() if each > 0)
    x = float(MARGIN)
    styles: dict[str, dict[str, str]] = {}
    for number, name in enumerate(told(terms)):
        turn, place = divmod(number, len(COLOURS))
        styles[name] = {"fill": COLOURS[place], "fill_opacity": "0.5" if turn else "1"}
        width = terms[name] * scale
        page.box(
            (min(x, x + width), page.y, abs(width), 2 * _BAR),
            f"{name}: {terms[name]:.2f} us",
            "term",
            **styles[name],
            stroke="white",
        )
        x += width
    page.y += 2 * _BAR + 6
    x = float(MARGIN)
    for name, style in styles.items():
        if x > WIDTH - MARGIN - 120:
            x, page.y = float(MARGIN), page.y + LINE
        page.box((x, page.y, 10, 10), name, "legend", **style)
        page.text(x + 14, page.y + 9, f"{name} {terms[name]:.2f}")
        x += 120
    page.y += 12


def _tiles(page: Page, layout: Sequence[Share], phase: int, name: str) -> None:
    """Draw the tiles that a cluster makes of one output, side by side as they lie in it."""
    tiles = by_tile(layout, phase)
    rows = sorted({each for each, _ in tiles})
    columns = sorted({each for _, each in tiles})
    page.heading(f"the first cluster's tiles of {name}, with ranks of CTAs")
    left = MARGIN + _LABEL
    width = (WIDTH - MARGIN - left) / len(columns)
    for number, across in enumerate(columns):
        if width > 60 or number % 2 == 0:
            page.text(left + number * width + 3, page.y + 8, range_text(across), font_size="10")
    page.y += 12
    for down in rows:
        page.text(MARGIN, page.y + _CELL_HEIGHT / 2, range_text(down), font_size="10")
        for number, across in enumerate(columns):
            shares = tiles.get((down, across))
            if shares:
                _tile(page, (left + number * width, width), (down, across), shares)
        page.y += _CELL_HEIGHT + 4


def _tile(
    page: Page, place: tuple[float, float], tile: tuple[Range, Range], shares: Sequence[Share]
) -> None:
    """Draw one tile; CTAs that sum parts of it stand in it side by side."""
    left, width = place
    each_width = (width - 4) / len(shares)
    for number, share in enumerate(shares):
        down, across = map(range_text, tile)
        title = (
            f"CTA {share.cta}: rows {down}, columns {across}, sums over "
            f"{range_text(share.reduction)}"
        )
        x = left + number * each_width
        colour = COLOURS[share.cta % len(COLOURS)]
        box = (x, page.y, each_width, _CELL_HEIGHT)
        page.box(box, title, "tile", fill=colour, fill_opacity="0.45", stroke="black")
        page.text(x + each_width / 2 - 4, page.y + 18, str(share.cta))
        words = f"sums {range_text(share.reduction)}"
        if each_width > _LETTER * len(words):
            page.text(x + 3, page.y + 36, words, font_size="9")
