"""Explains how a cascade streams, as a person would write it down and as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sympy

from crossfuse.cascade.algebra.stages import LAWS
from crossfuse.cascade.algebra.writing import written
from crossfuse.cascade.spec import Derivation, Slot, Stage, Step

_REDUCED = {"sum": "Σ", "prod": "Π"}


def explain(derivation: Derivation) -> str:
    """Explain a derivation as text: stages with proofs, state, merge, and the final results.

    Lines end without spaces, the text without a line break.
    """
    cascade = derivation.cascade
    lines = [_title(derivation), "", "Stages"]
    for step in derivation.steps:
        lines += _stage(cascade.stage(step.stage), step)
    lines += ["", "State: init; update with a tile"]
    lines += [f"  {each}" for slot in derivation.slots for each in _slot(slot)]
    if any(each.corrected or each.guard is not None for each in derivation.slots):
        lines.append("  (plain: so far; ': new; ~: what stands in for the new one)")
    lines += ["", "Merge of states a and b"]
    lines += [f"  {slot.name}' = {_merge(slot)}" for slot in derivation.slots]
    made = {name: each for name, each in derivation.stages.items() if written(each) != name}
    lines += _section("Stages from the final state", made)
    lines += _section("Results", derivation.results)
    lines += _section("Rows, in a second sweep", derivation.rows)
    lines += ["", _verdict(derivation)]
    return "\n".join(lines)


def _title(derivation: Derivation) -> str:
    cascade = derivation.cascade
    elements = ", ".join(each.name for each in cascade.elements)
    count = len(cascade.stages)
    number = "1 stage" if count == 1 else f"{count} stages"
    invariants = ", ".join(each.name for each in cascade.invariants)
    fixed = f"; fixed: {invariants}" if invariants else ""
    return f"Cascade of {number} over {elements}{fixed}"


def _stage(stage: Stage, step: Step) -> list[str]:
    cast = f", rounded to {stage.cast}" if stage.cast else ""
    lines = [f"  {stage.name} = {_reduction(stage)} {_operand(stage.term)}{cast}"]
    lines += [f"    pair: {step.pair}{_law(step.pair)}"] if step.pair else []
    if step.pair:
        lines += [
            f"    G = {written(each.element)},  H = {written(each.context)}"
            for each in step.factors
        ]
    if step.rescaling:
        names = ", ".join(step.rescaling)
        lines.append(f"    rescaled by {names}: {_why(stage, step)}")
    if step.correction is not None:
        lines.append(f"    correction: {written(step.correction)}")
    if step.hoisted:
        names = ", ".join(step.hoisted)
        lines.append(f"    applied once, at the end: {names}; G stays in range without")
    lines.append(f"    proof: {step.proof}")
    return lines + [f"    note: {each}" for each in step.notes]


def _why(stage: Stage, step: Step) -> str:
    if "shift" in step.pair:
        return "distances from a mean that moves"
    if stage.cast:
        return f"what is rounded to {stage.cast} must be scaled first"
    if step.correction is not None and step.correction.has(sympy.exp):
        return "exponentials would overflow without"
    return "powers would overflow or vanish without"


def _law(pair: str) -> str:
    found = [law for known, law in LAWS.items() if pair.startswith(known)]
    return f";  {found[0]}" if found else ""


def _reduction(stage: Stage) -> str:
    name = stage.monoid.name
    return f"top-{stage.monoid.k} of" if name == "topk" else _REDUCED.get(name, name)


def _operand(term: sympy.Expr) -> str:
    return f"({written(term)})" if isinstance(term, sympy.Add) else written(term)


def _slot(slot: Slot) -> list[str]:
    brought = _operand(slot.contribution)
    so_far = _operand(slot.carry) if slot.monoid.name == "prod" else written(slot.carry)
    if slot.monoid.name == "sum":
        update = f"{so_far} + Σ {brought}"
    elif slot.monoid.name == "prod":
        update = f"{so_far} · Π {brought}"
    elif slot.merge is None:
        kept = f"top {slot.monoid.k}" if slot.monoid.k else slot.monoid.name
        update = f"{kept} of {so_far} and {brought}, with where they stood"
    else:
        update = f"{slot.monoid.name}({so_far}, {slot.monoid.name} {brought})"
    lines = [f"{slot.name} = {written(slot.init)};  {slot.name}' = {update}"]
    if slot.guard is not None:
        (stand_in, test), _ = slot.guard.args
        lines.append(
            f"  {slot.name}~ is {slot.name}', but {written(stand_in)} where that is "
            f"{written(test.args[1])}"
        )
    return lines


def _merge(slot: Slot) -> str:
    if slot.merge is None:
        return f"that of the elements of {slot.name}_a and {slot.name}_b"
    return written(slot.merge)


def _section(title: str, parts: Mapping[str, sympy.Expr]) -> list[str]:
    lines = [f"  {name} = {written(each)}" for name, each in parts.items()]
    return ["", title, *lines] if lines else []


def _verdict(derivation: Derivation) -> str:
    if derivation.exact:
        return "Exact: in real arithmetic this is what two passes give."
    return f"Approximate: {derivation.reason}."


# Of a packaged cascade.


@dataclass(frozen=True)
class CascadeExplanation:
    """The derivation of a cascade, to print or to serialise."""

    #: Text of the spec.
    workload: str
    derivation: Derivation

    def text(self) -> str:
        """The derivation as a person would write it down."""
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


def explain_cascade(workload: str, func: Any) -> CascadeExplanation:
    """Derive the cascade of a workload from its function; refused is one that cannot stream."""
    from crossfuse.cascade.algebra import derive
    from crossfuse.cascade.rewrite.rows_first import sites_of

    (site,) = sites_of(func)
    return CascadeExplanation(workload, derive(site.cascade))
