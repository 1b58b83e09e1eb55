"""Pictures as trees of SVG elements, so that they are well-formed and tests can read them."""

from __future__ import annotations

from xml.etree import ElementTree

WIDTH, MARGIN, LINE = 760, 16, 22
#: Colours that differ in lightness too, after Okabe and Ito.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#999999", "#f0e442")


class Page:
    """Elements from the top down.

    Attributes
    ----------
    root : xml.etree.ElementTree.Element
        The picture.
    y : float
        Where the next line begins.
    """

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
        """Draw a rectangle (left, top, width, height); pointers show its title."""
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
        """The text of an SVG file."""
        height = self.y + MARGIN
        self.root.set("viewBox", f"0 0 {WIDTH} {height:g}")
        self.root.set("width", str(WIDTH))
        self.root.set("height", f"{height:g}")
        ElementTree.indent(self.root, " ")
        return ElementTree.tostring(self.root, encoding="unicode") + "\n"


def _named(style: dict[str, str]) -> dict[str, str]:
    return {name.replace("_", "-"): each for name, each in style.items()}
