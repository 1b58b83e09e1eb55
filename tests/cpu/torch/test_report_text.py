"""The text of a report fits a screen, and tells of each operator once."""

from __future__ import annotations

import re
from dataclasses import replace

from crossfuse.relax.outcome import ChainOutcome
from crossfuse.torch.report import COLUMNS, LINES, Report

MLP = ChainOutcome(
    "main", ("mm", "mm_1"), "ffn", "registers", 3.1, 5.0, "gemm_chain:" + "M=1," * 60
)


def layers(count: int, **changes: object) -> list[ChainOutcome]:
    names = [("mm", "bmm", "rms_norm"), ("mm", "bmm")]
    each = [replace(MLP, products=tuple(f"{one}_{n}" for one in names[0])) for n in range(count)]
    return [replace(one, **changes) for one in each]  # type: ignore[arg-type]


def words(text: str) -> list[str]:
    return re.findall(r"\b(?:mm|bmm|rms_norm)_\d+\b", text)


def test_sixteen_equal_layers_fit_a_screen() -> None:
    left = layers(16, name="", text="outline: found " + "a reason of some length " * 20)
    report = Report((*left, *layers(16)), tuple(f"aten.op{n}.default" for n in range(60)))
    text = report.text()
    lines = text.splitlines()
    assert len(lines) <= LINES and max(map(len, lines)) <= COLUMNS
    assert lines[0].startswith("16 x ffn, about 3.1 of 5.0 us; gemm_chain:M=1,")
    assert sorted(words(text)) == sorted({name for each in left for name in each.products})
    assert "a reason" not in text  # all of these operators became kernels in the end


def test_what_was_left_comes_last_and_says_why() -> None:
    left = [
        replace(each, products=(f"{each.products[0]}9",)) for each in layers(2, name="", text="why")
    ]
    text = Report((*left, MLP)).text()
    assert text.endswith("2 x left, why\n    mm_09 | mm_19")
    assert text.index("ffn, about") < text.index("left, why")


def test_a_report_of_everything_is_cut() -> None:
    many = [replace(each, text=f"reason {n}", name="") for n, each in enumerate(layers(100))]
    lines = Report(tuple(many)).text().splitlines()
    assert len(lines) == LINES and lines[-1].endswith("more lines: see Report.outcomes")
