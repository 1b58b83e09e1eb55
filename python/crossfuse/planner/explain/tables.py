"""An explanation as tables of rich."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from crossfuse.planner.choice import Runner
from crossfuse.planner.cost.terms import told
from crossfuse.planner.explain.levels import Level, Range, Share, size_text
from crossfuse.planner.families import EAGER
from crossfuse.planner.kernels.kernel import Resources
from crossfuse.planner.kernels.shape import Step

if TYPE_CHECKING:
    from rich.console import RenderableType

    from crossfuse.planner.explain.explanation import Explanation, Usage

#: Of rates that are not all measured.
PROVISIONAL = "rates of this device are provisional: not all of them were measured on it"
#: Terms of a runner-up that are shown.
_MOST_TERMS = 3


def printed(parts: Iterable[RenderableType], width: int) -> str:
    """Print tables as plain text, without colour."""
    from rich.console import Console

    file = io.StringIO()
    console = Console(
        file=file,
        width=width,
        highlight=False,
        color_system=None,
        force_terminal=False,
        force_jupyter=False,  # in a notebook rich would display tables, and write nothing
    )
    for each in parts:
        console.print(each)
    lines = (each.rstrip() for each in file.getvalue().splitlines())
    return "\n".join(lines) + "\n"


def of_chain(reasons: Explanation) -> list[RenderableType]:
    """Tables that plans of chains have alone."""
    found = [_places(reasons)]
    return [*found, _kernels(reasons), _layout(reasons)] if reasons.usage else found


def tiles_text(tiles: Mapping[str, Any]) -> str:
    """Format tiles as ``key=value``; those of several products as groups."""
    groups = [each for each in tiles.values() if isinstance(each, Mapping)]
    if groups:
        return " | ".join(map(tiles_text, groups))
    if phases := tiles.get("phases"):
        others = {name: each for name, each in tiles.items() if name != "phases"}
        return " | ".join(map(tiles_text, (others, *phases)))
    shown = ((name, each) for name, each in tiles.items() if each is not False)
    return " ".join(name if each is True else f"{name}={each}" for name, each in shown)


def head_of_chain(reasons: Explanation) -> RenderableType:
    """What a chain is, which kernel was chosen, and its time."""
    from rich.text import Text

    plan = reasons.plan
    extents = ", ".join(f"{name} = {size}" for name, size in plan.chain.extents.items())
    family = "do not fuse: a library's kernels" if plan.family == EAGER else plan.family
    lines = [
        f"chain of {len(plan.chain.products)} products, {extents}, on {plan.device}",
        f"{family}: {tiles_text(plan.tiles)}" if plan.tiles else family,
        f"{plan.microseconds:.2f} us estimated, bound by {plan.bound}",
    ]
    if reasons.provisional:
        lines.append(PROVISIONAL)
    return Text("\n".join(lines))


def table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> RenderableType:
    """Build a table under its title; columns whose heading ends with a space are right-aligned."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    # Titles of narrow tables would be broken at the width of these.
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in headings:
        numeric = heading.endswith(" ")
        table.add_column(heading.strip(), justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return Group(Text("\n" + title, style="bold"), table)


def levels_table(levels: Sequence[Level], total: float, texts: Mapping[str, str]) -> RenderableType:
    """Tabulate what is moved and computed; `texts` say what is counted."""
    rows = []
    for each in levels:
        alone = each.microseconds
        times = ("", "") if alone is None else (f"{alone:.2f}", f"{100 * alone / total:.0f} %")
        rows.append((each.name, each.text, *times, texts[each.name]))
    headings = ("level", "amount ", "us alone ", "of the time ", "what is counted")
    return table("levels", headings, rows)


def terms_table(terms: Mapping[str, float]) -> RenderableType:
    """Tabulate the terms of an estimate."""
    total = sum(terms.values())
    rows = [
        (name, f"{terms[name]:.2f}", f"{100 * terms[name] / total:.0f} %") for name in told(terms)
    ]
    title = "terms of the estimate; a stream counts what it adds to those above it"
    return table(title, ("term", "us ", "share "), rows)


def _places(reasons: Explanation) -> RenderableType:
    rows = (
        (each.tensor, each.role, size_text(each.bytes), each.level, each.text)
        for each in reasons.places
    )
    title = "where tensors live; sums: bytes of a CTA"
    return table(title, ("tensor", "role", "bytes ", "level", "how"), rows)


def _kernels(reasons: Explanation) -> RenderableType:
    """Tabulate the resources of the kernels, a column for each."""
    columns = [
        _kernel(taken, usage)
        for taken, usage in zip(reasons.plan.kernels, reasons.usage, strict=True)
    ]
    names = list(dict.fromkeys(name for each in columns for name in each))
    rows = [(name, *(each.get(name, "") for each in columns)) for name in names]
    headings = ("", *(f"kernel {index} " for index in range(len(columns))))
    return table("what kernels take", headings, rows)


def _kernel(taken: Resources, usage: Usage) -> dict[str, str]:
    shared = {f"  {name}": size_text(size) for name, size in usage.shared.items()}
    return {
        "CTAs": str(taken.ctas),
        "CTAs of a cluster": str(taken.cluster),
        "clusters": str(usage.clusters),
        "clusters at once": str(usage.resident),
        "waves, by phase": " + ".join(map(str, usage.waves)),
        "SMs without work": str(usage.idle_sms),
        "threads of a CTA": str(taken.threads),
        "registers of a thread for sums": str(taken.sums),
        "left + right stages": f"{taken.left_stages} + {taken.right_stages}",
        "shared memory of a CTA": size_text(taken.shared_bytes),
        **shared,
    }


def _layout(reasons: Explanation) -> RenderableType:
    products = reasons.plan.chain.products
    rows = [
        (
            products[each.phase].output,
            str(each.cta),
            *map(range_text, (each.rows, each.columns, each.reduction)),
        )
        for each in reasons.layout
    ]
    headings = ("makes", "CTA", "rows", "columns", "sums over")
    return table("the first cluster", headings, rows)


def range_text(each: Range) -> str:
    """Format a range."""
    return f"{each[0]}..{each[1]}" if each[0] < each[1] else "nothing"


def by_tile(layout: Sequence[Share], phase: int) -> dict[tuple[Range, Range], list[Share]]:
    """Group the shares of a phase by the tile that they make, or make a part of."""
    found: dict[tuple[Range, Range], list[Share]] = {}
    for each in layout:
        if each.phase == phase:
            found.setdefault((each.rows, each.columns), []).append(each)
    return found


def runners_table(title: str, runners: Sequence[Runner]) -> RenderableType:
    """Tabulate plans that were not chosen, and the terms that they lose on."""
    rows = []
    for each in runners:
        terms = list(each.loses.items())[:_MOST_TERMS]
        lost = ", ".join(f"{name} +{time:.2f}" for name, time in terms)
        family = "do not fuse" if each.family == EAGER else each.family
        rows.append((family, f"{each.microseconds:.2f}", lost, tiles_text(each.tiles)))
    return table(title, ("family", "us ", "loses on (us)", "tiles"), rows)


def pruned_table(pruned: Mapping[str, Sequence[Step]]) -> RenderableType:
    """Tabulate how many tiles each rule leaves."""
    rows = []
    for family, steps in pruned.items():
        before = steps[0].candidates
        rows.append((family, f"{before:,}", "", steps[0].text))
        for each in steps[1:]:
            if each.candidates < before:
                rows.append(
                    ("", f"{each.candidates:,}", f"{before - each.candidates:,}", each.text)
                )
            before = each.candidates
    title = "tiles that rules leave"
    return table(title, ("family", "left ", "pruned ", "what it keeps"), rows)
