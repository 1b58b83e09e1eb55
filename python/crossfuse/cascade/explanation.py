"""Explains how a cascade streams, as text and as plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from crossfuse.cascade.derivation import Derivation
    from crossfuse.workload.cascade_spec import CascadeSpec


@dataclass(frozen=True)
class CascadeExplanation:
    """The derivation of a cascade, to print or to serialise."""

    #: Text of the spec.
    workload: str
    derivation: Derivation

    def text(self) -> str:
        """The derivation as a person would write it down."""
        from crossfuse.cascade.algebra.explain import explain

        return f"{self.workload}\n{explain(self.derivation)}"

    def to_json(self) -> dict[str, Any]:
        """A value that `json` can write; expressions are sympy's text."""
        slots = [
            {
                "name": each.name,
                "monoid": each.monoid.name,
                "init": str(each.init),
                "carry": str(each.carry),
                "contribution": str(each.contribution),
                "merge": None if each.merge is None else str(each.merge),
                "guard": None if each.guard is None else str(each.guard),
            }
            for each in self.derivation.slots
        ]
        made = {"results": self.derivation.results, "rows": self.derivation.rows}
        return {
            "workload": self.workload,
            "slots": slots,
            **{key: {name: str(each) for name, each in of.items()} for key, of in made.items()},
            "exact": self.derivation.exact,
            "reason": self.derivation.reason,
        }


def explain_cascade(source: str | CascadeSpec) -> CascadeExplanation:
    """Derive a packaged cascade, such as ``"R7"`` or ``"softmax:rows=64,cols=1024"``.

    Refused is a source that is no cascade, or a cascade that cannot stream.
    """
    from crossfuse.cascade.algebra import derive
    from crossfuse.cascade.detect import detect
    from crossfuse.workload.cascade_build import prim_func
    from crossfuse.workload.cascades import resolve

    spec = resolve(source) if isinstance(source, str) else source
    (site,) = detect(prim_func(spec))
    return CascadeExplanation(str(spec), derive(site.cascade))
