"""Inputs and results of a workload: exact ones, and as separate kernels would round them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from crossfuse.calls import Seed, checked
from crossfuse.errors import CheckFailed, refuse
from crossfuse.workload.conv_chain import ConvChainSpec, windows
from crossfuse.workload.dtypes import Operand, float_type, stored
from crossfuse.workload.expression import Algebra, evaluate
from crossfuse.workload.spec import WorkloadSpec, affine, further_operands

_COMBINE = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}
_erf = np.frompyfunc(math.erf, 1, 1)


def _like(function: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
    """Compute in float64, and return the argument's type."""
    return lambda x: np.asarray(function(np.asarray(x, np.float64)), np.float64).astype(x.dtype)


#: Of arrays.
NUMPY = Algebra(
    constant=lambda value: value,
    functions={
        "exp": np.exp,
        "tanh": np.tanh,
        "sigmoid": _like(lambda x: 1.0 / (1.0 + np.exp(-x))),
        "erf": _like(_erf),
        "sqrt": np.sqrt,
        "abs": np.abs,
        "max": np.maximum,
        "min": np.minimum,
    },
)


@dataclass(frozen=True)
class Stages:
    """Every tensor of a workload, in float64."""

    #: Results of the first products with scale and bias, [M, N]; gate and up for a gated FFN.
    first: tuple[np.ndarray, ...]
    #: [M, N]: after activation and gating. Without a second product the output.
    hidden: np.ndarray
    #: [M, L], or [M, N] without a second product.
    output: np.ndarray


def activate(spec: WorkloadSpec, x: np.ndarray) -> np.ndarray:
    """Apply the activation of a spec to an array, in the array's type (float32 or float64)."""
    with np.errstate(all="ignore"):
        return np.asarray(evaluate(spec.act, x, NUMPY), x.dtype)


def weight(spec: WorkloadSpec, stored: np.ndarray) -> np.ndarray:
    """View a stored weight as [K, N]."""
    return stored.T if spec.weights == "nk" else stored


def left(spec: WorkloadSpec, values: Mapping[str, np.ndarray]) -> np.ndarray:
    """View the stored left operand as [M, K]: images as their windows."""
    stored = values[spec.operands[0].name]
    return windows(stored, spec.k1) if isinstance(spec, ConvChainSpec) else stored


def stages(spec: WorkloadSpec, inputs: Mapping[str, np.ndarray]) -> Stages:
    """Compute all tensors of a workload in float64 without any rounding in between.

    Inputs of other names, shapes or types than the spec's raise `CheckFailed`.
    """
    return _run(spec, inputs, np.float64, lambda x: x, lambda x: x)


@checked
def reference(spec: WorkloadSpec, inputs: Mapping[str, np.ndarray]) -> np.ndarray:
    """Compute the output in float64.

    Parameters
    ----------
    spec, inputs
        See `stages`.

    Returns
    -------
    numpy.ndarray
        float64 of shape ``spec.output``.

    Raises
    ------
    CheckFailed
        See `stages`.

    Examples
    --------
    >>> from crossfuse.workload import parse, random_inputs
    >>> spec = parse("gemm_chain:M=16,K=64,N=32,L=8")
    >>> exact = reference(spec, random_inputs(spec))
    >>> exact.shape, str(exact.dtype)
    ((16, 8), 'float64')
    """
    return stages(spec, inputs).output


@checked
def unfused(spec: WorkloadSpec, inputs: Mapping[str, np.ndarray]) -> np.ndarray:
    """Compute the output as one kernel per operator would.

    Products accumulate in float32; the result of every product (with its scale and its bias), of
    the activation and of the gating is rounded to the spec's type, the last one and the sum with a
    residual to the output type.

    Parameters
    ----------
    spec, inputs
        See `stages`.

    Returns
    -------
    numpy.ndarray
        Of the output type.

    Raises
    ------
    CheckFailed
        See `stages`.

    Examples
    --------
    >>> from crossfuse.workload import parse, random_inputs
    >>> spec = parse("gemm_chain:M=16,K=64,N=32,L=8")
    >>> rounded = unfused(spec, random_inputs(spec))
    >>> rounded.shape, str(rounded.dtype)
    ((16, 8), 'bfloat16')
    """
    kind, out = float_type(spec.dtype).numpy, float_type(spec.out).numpy

    def rounded(x: np.ndarray) -> np.ndarray:
        return x.astype(kind).astype(np.float32)

    result = _run(spec, inputs, np.float32, rounded, lambda x: x.astype(out).astype(np.float32))
    return result.output.astype(out)


def _run(
    spec: WorkloadSpec,
    inputs: Mapping[str, np.ndarray],
    work: type[np.floating],
    between: Callable[[np.ndarray], np.ndarray],
    last: Callable[[np.ndarray], np.ndarray],
) -> Stages:
    """Compute in the type `work`; `between` and `last` round what leaves an operator."""
    check_operands(spec.operands, inputs)
    values = {name: inputs[name].astype(work) for name in spec.inputs}
    matrices = [weight(spec, values[each.name]) for each in spec.weight_operands]
    a, (*first, final) = left(spec, values), spec.products

    def with_residual(x: np.ndarray) -> np.ndarray:
        # Adding it is an operator of its own; scale and bias are a part of the product.
        return last(last(x) + values["residual"]) if spec.residual else last(x)

    with np.errstate(all="ignore"):
        if spec.kind == "gemm":
            sums = finish(spec, final, _combined(spec, a, matrices[0]), values)
            if spec.act != "identity":
                sums = between(sums)
            output = with_residual(activate(spec, sums))
            return Stages((sums,), output, output)
        firsts = tuple(
            between(finish(spec, name, a @ matrix, values))
            for name, matrix in zip(first if spec.L else spec.products, matrices, strict=False)
        )
        hidden = between(activate(spec, firsts[0]))
        if not spec.L:
            output = with_residual(hidden * firsts[1])
            return Stages(firsts, output, output)
        if spec.gated:
            hidden = between(hidden * firsts[1])
        output = with_residual(finish(spec, final, hidden @ matrices[-1], values))
        return Stages(firsts, hidden, output)


def finish(
    spec: WorkloadSpec, product: str, sums: np.ndarray, values: Mapping[str, np.ndarray]
) -> np.ndarray:
    """Apply a product's scale and bias, of the inputs by name in `values`, to its sums.

    All are of one type.
    """
    scale, bias = affine(spec, product)
    if scale:
        sums = sums * values[scale]
    return sums + values[bias] if bias else sums


def _combined(spec: WorkloadSpec, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if spec.combine == "sum":
        return a @ b
    combine = _COMBINE[spec.combine]
    result = a[:, :1] * b[:1]
    # Column after column: all products at once would need M*N*K elements.
    for k in range(1, spec.K):
        result = combine(result, a[:, k : k + 1] * b[k : k + 1])
    return result


def check_operands(operands: Sequence[Operand], inputs: Mapping[str, np.ndarray]) -> None:
    """Raise `CheckFailed` for the first array that is missing, superfluous, or not as specified."""
    due = {each.name: f"{each.dtype}{list(each.shape)}" for each in operands}
    there = {name: f"{array.dtype}{list(array.shape)}" for name, array in inputs.items()}
    for name in sorted({*due, *there}):
        if due.get(name) != there.get(name):
            raise refuse(
                CheckFailed,
                "workload-inputs",
                name,
                found=there.get(name, "no such input"),
                limit=due.get(name, "the inputs " + ", ".join(due)),
                instead="pass the arrays that random_inputs(spec, seed) shows",
            )


# Inputs to check workloads with: random ones, and ones that break careless kernels.

Inputs = dict[str, np.ndarray]


@checked
def random_inputs(spec: WorkloadSpec, seed: Seed = 0) -> Inputs:
    """Draw inputs whose products are of order one.

    Parameters
    ----------
    spec : WorkloadSpec
        Says shapes and type.
    seed : int
        Equal seeds give equal inputs.

    Returns
    -------
    dict[str, numpy.ndarray]
        By name, in the order of the function's parameters.

    Examples
    --------
    >>> from crossfuse.workload import parse
    >>> inputs = random_inputs(parse("gemm:M=16,K=64,N=32"), seed=1)
    >>> [(name, each.shape) for name, each in inputs.items()]
    [('A', (16, 64)), ('B', (64, 32))]
    """
    rng = np.random.default_rng(seed)
    if spec.combine == "prod":
        # Factors spread around one, so that the product of K pairs stays of order one.
        factors = {n: _factors(rng, spec, spec.inputs[n]) for n in ("A", "B")}
        return stored(spec.operands, factors | _further(rng, spec))
    first = spec.operands[0]
    drawn = {first.name: rng.standard_normal(first.shape, np.float32)}
    for each in spec.weight_operands:
        depth = spec.N if each.name == "D" else spec.K
        drawn[each.name] = rng.standard_normal(each.shape, np.float32) / np.float32(np.sqrt(depth))
    return stored(spec.operands, drawn | _further(rng, spec))


@checked
def adversarial_inputs(spec: WorkloadSpec, seed: Seed = 0) -> Iterator[tuple[str, Inputs]]:
    """Yield named inputs on which rounding, masking and staging mistakes show.

    ``large``: results of the first product in the hundreds, where exponentials overflow unless
    guarded; smaller by a power of two where some result would otherwise leave its type's range.
    ``zero_rows``: every second row of A is zero. ``constant_rows``: every row of A repeats one
    value. ``denormal``: A holds denormals. ``one_hot``: each row of A picks one row of B.
    ``alternating``: A alternates in sign along K over weights that do not change along K, so that
    the first products cancel. ``opposite``: the residual is the output without it, negated.
    Of images, the rows of A are the pixels.
    With ``combine=prod`` the values of A are such that the product stays in range.

    Parameters
    ----------
    spec : WorkloadSpec
        Says shapes and type.
    seed : int
        Equal seeds give equal inputs.

    Yields
    ------
    name : str
        Of the case.
    inputs : dict[str, numpy.ndarray]
        By name, in the order of the function's parameters.

    Examples
    --------
    >>> from crossfuse.workload import parse
    >>> [name for name, inputs in adversarial_inputs(parse("gemm:M=16,K=64,N=32"))]
    ['large', 'zero_rows', 'constant_rows', 'denormal', 'one_hot', 'alternating']
    """
    base = {name: array.astype(np.float32) for name, array in random_inputs(spec, seed).items()}
    rng = np.random.default_rng(seed + 1)
    first = spec.operands[0]
    left = base[first.name].reshape(-1, first.shape[-1])
    rows, columns = np.indices(left.shape)
    kind = float_type(spec.dtype)
    product = spec.combine == "prod"
    signs = np.where(columns % 2, -1.0, 1.0)
    cases = {
        "large": left * (1.0 if product else 256.0),
        "zero_rows": np.where(rows % 2, left, 0.0),
        "constant_rows": 1.0 if product else left[:, :1],
        "denormal": rng.integers(-3, 4, left.shape) * kind.smallest,
        "one_hot": np.where(columns == (7 * rows + 3) % left.shape[1], 1.0, 0.0),
        "alternating": signs,
    }
    for name, a in cases.items():
        inputs = base | {first.name: np.broadcast_to(a, left.shape).reshape(first.shape)}
        if name == "alternating" and not product:
            inputs |= {key: _level(spec, base[key]) for key in base if key.startswith("B")}
        yield name, _in_range(spec, inputs) if name == "large" else stored(spec.operands, inputs)
    if spec.residual:
        alone = stages(
            spec, stored(spec.operands, base | {"residual": np.zeros(spec.output)})
        ).output
        yield "opposite", stored(spec.operands, base | {"residual": -alone})


def _in_range(spec: WorkloadSpec, inputs: dict[str, np.ndarray]) -> Inputs:
    """Halve A until every tensor fits its type; a row of zeros surely does."""
    room = min(float_type(spec.dtype).largest, float_type(spec.out).largest) / 4
    first = spec.operands[0].name
    while True:
        rounded = stored(spec.operands, inputs)
        tensors = stages(spec, rounded)
        largest = max(np.max(np.abs(t)) for t in (*tensors.first, tensors.hidden, tensors.output))
        if largest <= room or not rounded[first].any():
            return rounded
        inputs = inputs | {first: inputs[first] / 2}


def _factors(rng: np.random.Generator, spec: WorkloadSpec, shape: tuple[int, ...]) -> np.ndarray:
    magnitude = np.exp(rng.standard_normal(shape, np.float32) / np.float32(2 * np.sqrt(spec.K)))
    return magnitude * rng.choice(np.array([-1, 1], np.float32), shape)


def _further(rng: np.random.Generator, spec: WorkloadSpec) -> dict[str, np.ndarray]:
    """Biases and residuals of order one, and scales around one, none of which is one."""
    drawn = {}
    for each in further_operands(spec):
        values = rng.standard_normal(each.shape, np.float32)
        drawn[each.name] = np.exp(values / 2) if each.name.startswith("scale") else values
    return drawn


def _level(spec: WorkloadSpec, stored: np.ndarray) -> np.ndarray:
    """Repeat the first value of every column of [K, N] along K."""
    return np.broadcast_to(stored[:, :1] if spec.weights == "nk" else stored[:1], stored.shape)
