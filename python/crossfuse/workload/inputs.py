"""Inputs to check workloads with: random ones, and ones that break careless kernels."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from crossfuse.calls import Seed, checked
from crossfuse.workload.dtypes import float_type, stored
from crossfuse.workload.numerics import stages
from crossfuse.workload.spec import WorkloadSpec, further_operands

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
