"""Groups that are chains, with their plans: of one number of rows, and of symbolic rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tvm.ir import Var

from crossfuse.planner.families import EAGER
from crossfuse.relax.chains.groups import Group
from crossfuse.relax.chains.outcome import BinOutcome
from crossfuse.relax.chains.symbols import text_of
from crossfuse.relax.outline import Outlined

if TYPE_CHECKING:
    from crossfuse.planner.cascade.plan import CascadePlan
    from crossfuse.planner.choice import Runner
    from crossfuse.planner.plan import Plan


@dataclass(frozen=True)
class PlannedChain:
    """A group that is a chain, with its plans.

    Attributes
    ----------
    group : Group
        Its products and what lies between them.
    output : Var
        The result.
    given : tuple[Var, ...]
        What it reads: the parameters of the function that was outlined.
    outlined : Outlined
        The chain as one function.
    plans : tuple[Plan, ...]
        The fastest first.
    """

    group: Group
    output: Var
    given: tuple[Var, ...]
    outlined: Outlined
    plans: tuple[Plan | CascadePlan, ...]

    @property
    def name(self) -> str:
        """What functions of it are called."""
        return f"crossfuse_{self.outlined.kind}"

    @property
    def ours(self) -> Plan | CascadePlan:
        """The best plan of a kernel of ours."""
        return next(each for each in self.plans if each.family != EAGER)

    @property
    def eager(self) -> float:
        """Estimated microseconds of not fusing."""
        every: list[Plan | CascadePlan | Runner] = [*self.plans, *self.plans[0].runners]
        return next(each.microseconds for each in every if each.family == EAGER)

    @property
    def gain(self) -> float:
        """Estimated microseconds that fusing saves."""
        return self.eager - self.ours.microseconds

    @property
    def summary(self) -> str:
        """What it is, for people."""
        return self.outlined.summary

    def left(self, always: bool) -> str:
        """Why it is not to be fused; empty if it is."""
        if self.gain > 0 or always:
            return ""
        return f"not to fuse is estimated to be faster by {-self.gain:.1f} us"


@dataclass(frozen=True)
class PlannedBin:
    """A chain of symbolic rows in one bin.

    Attributes
    ----------
    rows : int
        Rows of a call at most.
    chain : PlannedChain | None
        The chain of so many rows; None if it is none.
    text : str
        Why it is none.
    """

    rows: int
    chain: PlannedChain | None
    text: str = ""

    def outcome(self, always: bool, name: str = "", text: str = "") -> BinOutcome:
        """What becomes of it; with the name of its kernel, or the reason why there is none."""
        if self.chain is None:
            return BinOutcome(self.rows, "", "", None, None, self.text)
        ours, text = self.chain.ours, text or self.chain.left(always)
        family = EAGER if self.chain.left(always) else ours.family
        return BinOutcome(self.rows, name, family, ours.microseconds, self.chain.eager, text)


@dataclass(frozen=True)
class PlannedRows:
    """A group whose number of rows is symbolic, planned in each bin of rows.

    Attributes
    ----------
    group, output, given
        As of `PlannedChain`.
    function : relax.Function
        The group alone, its parameters in the order of `given`.
    rows : tvm.ir.Expr
        Number of rows, of symbols that the parameters' shapes define.
    bins : tuple[PlannedBin, ...]
        Few rows first; at least one has a chain.
    """

    group: Group
    output: Var
    given: tuple[Var, ...]
    function: Any
    rows: Any
    bins: tuple[PlannedBin, ...]

    @property
    def best(self) -> PlannedChain:
        """The chain of the bin in which fusing saves most."""
        chains = [each.chain for each in self.bins if each.chain is not None]
        return max(chains, key=lambda each: each.gain)

    @property
    def name(self) -> str:
        """What functions of it are called."""
        return self.best.name

    @property
    def ours(self) -> Plan | CascadePlan:
        """The best plan of a kernel of ours, in the bin in which fusing saves most."""
        return self.best.ours

    @property
    def eager(self) -> float:
        """Estimated microseconds of not fusing, in that bin."""
        return self.best.eager

    @property
    def gain(self) -> float:
        """Estimated microseconds that fusing saves, in that bin."""
        return self.best.gain

    @property
    def summary(self) -> str:
        """What it is, for people."""
        return f"of {text_of(self.rows)} rows, as {self.best.summary}"

    def left(self, always: bool) -> str:
        """Why it is not to be fused in any bin; empty if it is."""
        return self.best.left(always)
