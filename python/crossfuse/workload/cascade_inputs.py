"""Inputs of cascades, and how far from float64 their results may be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from crossfuse.errors import CheckFailed, refuse
from crossfuse.workload import cascade_spec
from crossfuse.workload.cascade_numerics import Arrays, below_maximum, reference, run, unfused
from crossfuse.workload.cascade_spec import QUANTISED, CascadeSpec
from crossfuse.workload.dtypes import FLOAT_TYPES, float_type, stored
from crossfuse.workload.tolerances import Accuracy, judge, plain_tolerance

# Inputs to check cascades with: random ones, and ones that break careless kernels.

Inputs = dict[str, np.ndarray]

#: Operands that are the weights of a product, which scale with the terms of its sums.
WEIGHTS = ("weight", "router", "gate", "up", "down")
#: Operands around one.
FACTORS = ("gamma", "weight_scale", "mass")


def random_inputs(spec: CascadeSpec, seed: int = 0) -> Inputs:
    """Draw inputs of order one by name, in the order of the function's parameters.

    Equal seeds give equal inputs.
    """
    rng = np.random.default_rng(seed)
    drawn: dict[str, np.ndarray] = {}
    for each in spec.operands:
        if each.dtype == "int32":
            drawn[each.name] = rng.integers(0, spec.operands[0].shape[-1], each.shape)
            continue
        values = rng.standard_normal(each.shape, np.float32)
        if each.name in FACTORS:
            values = np.exp(values / 2)
        elif each.name in WEIGHTS and len(each.shape) > 1:
            values = values / np.float32(np.sqrt(each.shape[-1]))
        drawn[each.name] = values
    return stored(spec.operands, drawn)


def adversarial_inputs(spec: CascadeSpec, seed: int = 0) -> Iterator[tuple[str, Inputs]]:
    """Yield names and inputs on which mistakes of rounding, masking and correction show.

    All of them change ``x``, or the queries; a residual is zero in them. ``large``: 64 times as
    large, so that exponentials overflow unless they are taken below the maximum. ``zero_rows``:
    every second row is zero.
    ``constant_rows``: each repeats one value. ``denormal``: denormals only. ``ascending``: each
    element of a row is larger than the one before, so that every one changes the maximum.
    ``descending``: none does. ``offset``: one thousand more, which cancels in deviations.
    ``alternating``: of one magnitude, the sign changing. ``infinite``, of a softmax and of what is
    made of one: every third element is -inf.

    Equal seeds give equal inputs.
    """
    base = random_inputs(spec, seed)
    first = next((each for each in spec.operands if each.name == "x"), spec.operands[0])
    values = base[first.name].astype(np.float32)
    for name, change in _CASES.items():
        if name == "infinite" and not spec.masked:
            continue
        changed = change(values.reshape(-1, first.shape[-1]), float_type(first.dtype).smallest)
        inputs = dict(base) | {first.name: changed.reshape(first.shape)}
        if "residual" in inputs:
            inputs["residual"] = np.zeros_like(inputs["residual"])
        if name == "infinite" and "labels" in inputs:
            # The first element of a row is finite: a loss of infinity checks nothing.
            inputs["labels"] = np.zeros_like(inputs["labels"])
        yield name, stored(spec.operands, inputs)


def _infinite(x: np.ndarray, smallest: float) -> np.ndarray:
    return np.where(np.arange(x.shape[1]) % 3 == 2, np.float32(-np.inf), x)


_CASES: Mapping[str, Callable[[np.ndarray, float], np.ndarray]] = {
    "large": lambda x, smallest: x * 64,
    "zero_rows": lambda x, smallest: np.where(np.arange(len(x))[:, None] % 2, x, 0),
    "constant_rows": lambda x, smallest: np.broadcast_to(x[:, :1], x.shape),
    "denormal": lambda x, smallest: np.sign(x) * np.ceil(np.abs(x)) * smallest,
    "ascending": lambda x, smallest: np.sort(x, axis=1),
    "descending": lambda x, smallest: -np.sort(-x, axis=1),
    "offset": lambda x, smallest: x + 1000,
    "alternating": lambda x, smallest: np.where(np.arange(x.shape[1]) % 2, -1.0, 1.0) + 0 * x,
    "infinite": _infinite,
}


# Errors of computed cascades, and the errors that are allowed.

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
    if isinstance(spec, cascade_spec.QuantGemm):
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
        elif isinstance(spec, cascade_spec.MoeRouting):
            _check_chosen(spec, inputs, output, exact["gates"], noise["gates"])
    return found


def _noise(
    spec: CascadeSpec, inputs: Arrays, exact: Arrays, **units: float
) -> dict[str, np.ndarray]:
    """Error at each element that rounding in float32 explains; in some inputs, by their `units`."""
    rng = np.random.default_rng(0)
    unit = FLOAT_TYPES["float32"].unit * np.sqrt(_depth(spec))
    most = {each.name: np.zeros(each.shape) for each in spec.outputs}
    # Large, and nothing cancels behind the rows but what the plain tolerance knows.
    still = WEIGHTS if isinstance(spec, cascade_spec.NormFfn) else ()
    for _ in range(_DRAWS):
        moved = {n: e if n in still else _moved(rng, e, unit) for n, e in inputs.items()}
        moved |= {name: _moved(rng, moved[name], each) for name, each in units.items()}
        found = run(spec, moved, np.float64, lambda x, _: x, typed=False)
        with np.errstate(all="ignore"):
            for name in most:
                most[name] = np.fmax(most[name], np.abs(found[name] - exact[name]))
    return {name: _DRAWS * array for name, array in most.items()}


def _moved(rng: np.random.Generator, array: np.ndarray, unit: float) -> np.ndarray:
    if array.dtype == np.int32:
        return array
    return array.astype(np.float64) * (1 + unit * rng.choice([-1.0, 1.0], array.shape))


def _check_chosen(
    spec: cascade_spec.MoeRouting,
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
