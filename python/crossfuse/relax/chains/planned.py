"""Groups that are chains, with their plans: of one number of rows, and of symbolic rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tvm.ir import Var

from crossfuse.errors import RefusedError
from crossfuse.planner.families import EAGER
from crossfuse.relax.chains.forms import Form
from crossfuse.relax.choice import PlannedGroup
from crossfuse.relax.operators import refused
from crossfuse.relax.outcome import BinOutcome
from crossfuse.relax.outline import Outlined
from crossfuse.relax.symbols import (
    at_sizes,
    check_rows,
    cut,
    most_rows,
    rows_of,
    sizes_for,
    text_of,
)


@dataclass(frozen=True)
class PlannedChain(PlannedGroup):
    """A group that is a chain, or of another form, with its plans."""

    #: The chain as one function.
    outlined: Outlined
    #: How that is planned and scheduled.
    form: Form

    @property
    def name(self) -> str:
        """Name of its kernels."""
        return f"crossfuse_{self.outlined.kind}"

    @property
    def summary(self) -> str:
        """See `Planned`."""
        return self.outlined.summary


@dataclass(frozen=True)
class PlannedBin:
    """A chain of symbolic rows in one bin."""

    #: The most rows of a call.
    rows: int
    #: The chain at that many rows; None if the group is none.
    chain: PlannedChain | None
    #: Why it is none.
    text: str = ""

    def outcome(self, always: bool, name: str = "", text: str = "") -> BinOutcome:
        """Its outcome, with the name of its kernel or the reason why it has none."""
        if self.chain is None:
            return BinOutcome(self.rows, "", "", None, None, self.text)
        left = self.chain.left(always)
        family, text = EAGER if left else self.chain.family, text or left
        times, words = self.chain.times, self.chain.words
        return BinOutcome(self.rows, name, family, *times, text, words)


@dataclass(frozen=True)
class PlannedRows:
    """A group whose number of rows is symbolic, planned in each bin of rows."""

    #: As in `PlannedGroup`.
    output: Var
    #: As in `PlannedGroup`.
    given: tuple[Var, ...]
    #: The group alone, a Relax function; its parameters are in the order of `given`.
    function: Any
    #: Number of rows, an expression of symbols that the parameters' shapes define.
    rows: Any
    #: Few rows first; at least one has a chain.
    bins: tuple[PlannedBin, ...]

    @property
    def best(self) -> PlannedChain:
        """The chain of the bin in which fusing saves most."""
        chains = [each.chain for each in self.bins if each.chain is not None]
        return max(chains, key=lambda each: each.gain)

    @property
    def name(self) -> str:
        """Name of its kernels."""
        return self.best.name

    @property
    def family(self) -> str:
        """Family of the best kernel of ours, in the bin in which fusing saves most."""
        return self.best.family

    @property
    def times(self) -> tuple[float, float]:
        """See `Planned`, in that bin."""
        return self.best.times

    @property
    def gain(self) -> float:
        """Microseconds that fusing saves, in that bin."""
        return self.best.gain

    @property
    def words(self) -> str:
        """Nothing: each bin reports its own measurements."""
        return ""

    @property
    def summary(self) -> str:
        """One line on the group, for reports."""
        return f"of {text_of(self.rows)} rows, as {self.best.summary}"

    def left(self, always: bool) -> str:
        """Why it is not to be fused in any bin; empty if it is."""
        return self.best.left(always)


# Groups of symbolic rows are planned at the largest number of rows of each bin.

#: Plans a group of static shapes, a module of its own, at some sizes of its symbols.
Planner = Callable[[Any, Mapping[Var, int]], PlannedChain]


@dataclass(frozen=True)
class Bins:
    """Bins of rows that kernels are made for, each by its most rows."""

    #: At least one number.
    rows: Sequence[int]
    #: Those of the model's function, which may bound symbols.
    attributes: Mapping[str, Any] | None


def plan_rows(
    output: Var, given: tuple[Var, ...], function: Any, bins: Bins, plan: Planner
) -> PlannedRows:
    """Plan a group of symbolic rows in all bins; those without a chain carry the reason.

    `function` is the group alone, `plan` plans it at static shapes. Refused are tensors with
    symbols besides a number of rows; if no bin has a chain, the reason is that of the first.
    """
    rows = rows_of(output)
    found: dict[int, PlannedBin] = {}
    refusals: list[RefusedError] = []
    for most in cut(bins.rows, most_rows(rows, bins.attributes)):
        sizes = sizes_for(rows, most)
        if not sizes:
            continue
        try:
            chain = plan(at_sizes(function, sizes), sizes)
            _check(chain, output, rows)
            found[chain.outlined.M] = PlannedBin(chain.outlined.M, chain)
        except RefusedError as error:
            refusals.append(error)
            found.setdefault(most, PlannedBin(most, None, str(error)))
    every = tuple(found[each] for each in sorted(found))
    if all(each.chain is None for each in every):
        raise next(iter(refusals), _no_bin(rows, bins))
    return PlannedRows(output, given, function, rows, every)


def _no_bin(rows: Any, bins: Bins) -> RefusedError:
    return refused(
        "bins",
        f"{text_of(rows)} rows, the fewest of which are too many for a bin",
        f"bins of {', '.join(map(str, bins.rows))} rows",
        "add a bin of more rows",
    )


def _check(chain: PlannedChain, output: Var, rows: Any) -> None:
    """Refuse a chain with symbols that are more than a number of rows."""
    for each in chain.outlined.arguments:
        if each.value is None:
            check_rows(chain.given[each.position], each.shape, rows)
    check_rows(output, (chain.outlined.M, chain.outlined.L), rows)
