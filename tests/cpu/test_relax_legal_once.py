"""Equal calls of operators share a definition, and become what they were without that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tvm import relax
from tvm_ffi import structural_equal

from crossfuse.relax.operators import LEGAL, legal_once

pytestmark = pytest.mark.cpu

op = relax.op


def once_each(x: Any, y: Any) -> list[Any]:
    """Calls that are alike but for one thing each, and some that are alike."""
    return [
        op.multiply(x, x),
        op.multiply(x, y),
        op.multiply(y, x),
        op.power(x, relax.const(2.0)),
        op.power(y, relax.const(2.0)),
        op.power(x, relax.const(3.0)),
        op.power(x, relax.const(0.5)),
        op.sum(x, axis=0),
        op.sum(y, axis=0),
        op.sum(x, axis=1),
        op.astype(x, "float16"),
        op.astype(y, "bfloat16"),
        op.reshape(x, (4, 16)),
        op.reshape(y, (16, 4)),
        op.concat([x, y], axis=0),
        op.concat([y, x], axis=0),
        op.nn.softmax(x),
        op.nn.softmax(y),
    ]


def module(calls: Callable[[Any, Any], list[Any]]) -> Any:
    builder = relax.BlockBuilder()
    x, y = (relax.Var(name, relax.TensorType((8, 8), "float32")) for name in "xy")
    with builder.function("main", [x, y]):
        with builder.dataflow():
            made = [builder.emit(each) for each in calls(x, y)]
            result = builder.emit_output(relax.Tuple(made))
        builder.emit_func_output(result)
    return builder.get()


@pytest.mark.parametrize("times", [1, 3])
def test_it_is_what_each_call_by_itself_becomes(times: int) -> None:
    mod = module(lambda x, y: once_each(x, y) * times)
    (block,) = mod["main"].body.blocks
    made = relax.transform.LegalizeOps(legal_once(each.value for each in block.bindings))(mod)
    assert made.script() == relax.transform.LegalizeOps(dict(LEGAL))(mod).script()
    assert structural_equal(made, relax.transform.LegalizeOps(dict(LEGAL))(mod))


def test_an_operator_is_defined_once(monkeypatch: pytest.MonkeyPatch) -> None:
    defined, power = [], LEGAL["relax.power"]

    def counted(builder: Any, call: Any) -> Any:
        defined.append(call)
        return power(builder, call)

    monkeypatch.setitem(LEGAL, "relax.power", counted)
    mod = module(lambda x, y: once_each(x, y) * 3)
    (block,) = mod["main"].body.blocks
    relax.transform.LegalizeOps(legal_once(each.value for each in block.bindings))(mod)
    assert len(defined) == 3  # exponents
