"""Errors of computed cascades, and the errors that are allowed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from crossfuse.errors import CheckFailed, refuse
from crossfuse.workload import cascade_products
from crossfuse.workload.accuracy import Accuracy, judge
from crossfuse.workload.cascade_numerics import Arrays, below_maximum, reference, run, unfused
from crossfuse.workload.cascade_products import QUANTISED
from crossfuse.workload.cascade_spec import CascadeSpec
from crossfuse.workload.dtypes import FLOAT_TYPES
from crossfuse.workload.tolerances import plain_tolerance

#: How often inputs are moved to see what rounding does.
_DRAWS = 4


def check(spec: CascadeSpec, inputs: Arrays, outputs: Arrays) -> dict[str, Accuracy]:
    """Errors of each floating-point output by the rule of `crossfuse.workload.tolerances`.

    What float32 sums may do is what float64 does on inputs perturbed by as much: this also covers
    differences that cancel. `CheckFailed` says that an output has another shape or type, is too far
    off, or that chosen elements are not among the largest.
    """
    exact, separate = reference(spec, inputs), unfused(spec, inputs)
    noise = _noise(spec, inputs, exact)
    anywhere = noise
    if isinstance(spec, cascade_products.QuantGemm):
        # Single elements of separate kernels may be near by chance; all of them together are not.
        anywhere = _noise(spec, inputs, exact, x=FLOAT_TYPES[QUANTISED].unit)
    found = {}
    for each in spec.outputs:
        output, where = outputs[each.name], f"{spec}, output '{each.name}'"
        due = f"{each.dtype}{list(each.shape)}"
        if f"{output.dtype}{list(output.shape)}" != due:
            got, instead = f"{output.dtype}{list(output.shape)}", "give it that shape and type"
            raise refuse(CheckFailed, "output-type", where, found=got, limit=due, instead=instead)
        if each.dtype in FLOAT_TYPES:
            plain = plain_tolerance(exact[each.name], separate[each.name], _depth(spec))
            limits = replace(
                plain,
                absolute=plain.absolute + np.nan_to_num(anywhere[each.name]),
                norm=plain.norm + float(np.linalg.norm(np.nan_to_num(noise[each.name]))),
            )
            found[each.name] = judge(limits, output, where)
        elif isinstance(spec, cascade_products.MoeRouting):
            _check_chosen(spec, inputs, output, exact["gates"], noise["gates"])
    return found


def _noise(
    spec: CascadeSpec, inputs: Arrays, exact: Arrays, **units: float
) -> dict[str, np.ndarray]:
    """Error at each element that rounding in float32 explains; in some inputs, by their `units`."""
    rng = np.random.default_rng(0)
    unit = FLOAT_TYPES["float32"].unit * np.sqrt(_depth(spec))
    most = {each.name: np.zeros(each.shape) for each in spec.outputs}
    for _ in range(_DRAWS):
        moved = {name: _moved(rng, array, unit) for name, array in inputs.items()}
        moved |= {name: _moved(rng, moved[name], each) for name, each in units.items()}
        found = run(spec, moved, np.float64, lambda x: x, lambda x: x, typed=False)
        with np.errstate(all="ignore"):
            for name in most:
                most[name] = np.fmax(most[name], np.abs(found[name] - exact[name]))
    return {name: _DRAWS * array for name, array in most.items()}


def _moved(rng: np.random.Generator, array: np.ndarray, unit: float) -> np.ndarray:
    if array.dtype == np.int32:
        return array
    return array.astype(np.float64) * (1 + unit * rng.choice([-1.0, 1.0], array.shape))


def _check_chosen(
    spec: cascade_products.MoeRouting,
    inputs: Arrays,
    chosen: np.ndarray,
    gates: np.ndarray,
    noise: np.ndarray,
) -> None:
    """Check that chosen experts are as good as the best, up to rounding, and all different."""
    logits = inputs["x"].astype(np.float64) @ inputs["router"].astype(np.float64).T
    power, total = below_maximum(logits)
    inside = np.clip(chosen, 0, spec.experts - 1)
    found = np.take_along_axis(power / total, inside, axis=1)
    repeated = np.sort(inside, axis=1)
    allowed = 4 * (noise + FLOAT_TYPES["float32"].unit * np.sqrt(_depth(spec)) * gates)
    wrong = np.argwhere((np.abs(found - gates) > allowed) | (inside != chosen))
    wrong = np.concatenate([wrong, np.argwhere(repeated[:, 1:] == repeated[:, :-1])])
    if len(wrong):
        row = int(wrong[0][0])
        best = np.argsort(-logits[row], kind="stable")[: spec.top_k]
        raise refuse(
            CheckFailed,
            "chosen",
            f"{spec}, output 'chosen'",
            found=f"{chosen[row].tolist()} in row {row}",
            limit=f"{best.tolist()}, as in float64",
            instead="emulate the kernel to find the first wrong element",
        )


def _depth(spec: CascadeSpec) -> int:
    """Number of terms of the longest sum."""
    return max(each.shape[-1] for each in spec.operands)
