"""The parts of a page that need no compiler."""

from __future__ import annotations

from xml.etree import ElementTree

from crossfuse.schedule.cluster_layout import ClusterLayout, Slabs
from crossfuse.view.write import cluster_html, page, timeline

EVENTS = [
    {"name": "begin", "first": 0.0, "median": 0.2, "last": 0.5, "ctas": 132},
    {"name": "multiplied 0", "first": 6.0, "median": 7.0, "last": 8.0, "ctas": 132},
]


def boxes(svg: str, kind: str) -> list[tuple[float, float]]:
    """Left and right of all boxes of a class."""
    found = ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}rect")
    return [
        (float(each.attrib["x"]), float(each.attrib["x"]) + float(each.attrib["width"]))
        for each in found
        if each.attrib["class"] == kind
    ]


def test_terms_follow_one_another_and_stamps_share_their_scale() -> None:
    svg = timeline({"start": 2.0, "hbm": 6.0}, [{"kernel": "main_kernel", "events": EVENTS}])
    (start, hbm), (begin, multiplied) = boxes(svg, "step"), boxes(svg, "event")
    assert abs(hbm[0] - start[1]) < 0.2
    assert abs(hbm[1] - multiplied[1]) < 0.2, "both end at 8 us"
    assert begin[0] == start[0]


def test_a_term_that_takes_back_ends_before_the_one_above_it() -> None:
    start, learned = boxes(timeline({"start": 2.0, "learned": -0.5}), "step")
    assert abs(learned[1] - start[1]) < 0.2
    assert learned[0] < start[1]


def test_a_cluster_has_a_box_for_each_cta() -> None:
    slabs = Slabs("P", "float32", "x", 4, (8, 16), 512, ("make",), ("take",), "scatter")
    text = cluster_html(ClusterLayout((("x", 4),), (), (slabs,)))
    assert text.count('class="slab"') == 4
    assert "CTA r combines slice r of all 4 slabs" in text
    assert "No clusters" in cluster_html(ClusterLayout((), (), ()))


def test_a_page_needs_no_network_and_takes_titles_as_they_are() -> None:
    text = page("a < b", {"Plan": "<p>one</p>", "Nothing": ""})
    assert "a &lt; b" in text
    assert "Nothing" not in text
    assert "http" not in text
    assert "<style>body" in text
