"""Relax models of a few calls, and how they are run: what passes over dataflow are tested on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm.relax import op

from crossfuse.relax.pipeline import serial_kernels

#: Shape and type of each parameter by name.
Parameters = Mapping[str, tuple[tuple[Any, ...], str]]
#: Emits an operator, and gives the variable that it is bound to.
Emit = Callable[[Any], Any]


def legalised(parameters: Parameters, build: Callable[..., Any]) -> Any:
    """A module of one dataflow block; `build` takes `Emit` and the parameters."""
    builder = relax.BlockBuilder()
    given = [
        relax.Var(name, relax.TensorType(shape, dtype))
        for name, (shape, dtype) in parameters.items()
    ]
    with builder.function("main", given):
        with builder.dataflow():
            made = build(builder.emit, *given)
            made = made if isinstance(made, tuple) else (made,)
            results = [builder.emit_output(each) for each in made]
        builder.emit_func_output(results[0] if len(results) == 1 else relax.Tuple(results))
    return relax.transform.LegalizeOps()(builder.get())


def run(mod: Any, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The results of a module on the CPU; what is bound to a GPU is made serial."""
    plain = serial_kernels(mod)
    built = tvm.compile(plain, target=tvm.target.Target({"kind": "llvm", "opt-level": 1}))
    machine = relax.VirtualMachine(built, tvm.cpu())
    found = machine["main"](*map(tvm.runtime.tensor, inputs))
    return [_numpy(each) for each in ([found] if hasattr(found, "numpy") else found)]


def _numpy(found: Any) -> Any:
    """A tensor as an array, a tuple of them as a list of arrays."""
    return found.numpy() if hasattr(found, "numpy") else [_numpy(each) for each in found]


def normals(parameters: Parameters, seed: int = 0) -> list[np.ndarray]:
    """Inputs from the normal distribution."""
    random = np.random.default_rng(seed)
    return [random.standard_normal(s).astype(dtype) for s, dtype in parameters.values()]


def number(value: float, dtype: str = "float32") -> Any:
    """A constant."""
    return relax.const(value, dtype)


def heads(emit: Emit, x: Any, count: int) -> Any:
    """[batch, length, width] as [batch, head, length, depth]."""
    batch, length, width = (int(each) for each in x.ty.shape.values)
    split = emit(op.reshape(x, (batch, length, count, width // count)))
    return emit(op.permute_dims(split, [0, 2, 1, 3]))


def together(emit: Emit, x: Any) -> Any:
    """The way back."""
    batch, count, length, depth = (int(each) for each in x.ty.shape.values)
    turned = emit(op.permute_dims(x, [0, 2, 1, 3]))
    return emit(op.reshape(turned, (batch, length, count * depth)))


def scores(emit: Emit, q: Any, k: Any, scale: float) -> Any:
    """Scaled products of queries and keys."""
    turned = emit(op.permute_dims(k, [0, 1, 3, 2]))
    return emit(op.multiply(emit(op.matmul(q, turned)), number(scale, str(q.ty.dtype))))


def softmax(emit: Emit, x: Any) -> Any:
    """Written out: two reductions with element-wise operators between them."""
    high = emit(op.max(x, -1, keepdims=True))
    power = emit(op.exp(emit(op.subtract(x, high))))
    return emit(op.divide(power, emit(op.sum(power, -1, keepdims=True))))


def rms_norm(emit: Emit, x: Any, gamma: Any) -> Any:
    """Written out."""
    mean = emit(op.mean(emit(op.multiply(x, x)), -1, keepdims=True))
    root = emit(op.rsqrt(emit(op.add(mean, number(1e-5)))))
    return emit(op.multiply(emit(op.multiply(x, root)), gamma))


def layer_norm(emit: Emit, x: Any, gamma: Any, beta: Any) -> Any:
    """Written out."""
    away = emit(op.subtract(x, emit(op.mean(x, -1, keepdims=True))))
    spread = emit(op.mean(emit(op.multiply(away, away)), -1, keepdims=True))
    normal = emit(op.divide(away, emit(op.sqrt(emit(op.add(spread, number(1e-5)))))))
    return emit(op.add(emit(op.multiply(normal, gamma)), beta))
