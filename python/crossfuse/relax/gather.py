"""``relax.take`` as a function that reads where the index says, for ``LegalizeOps``.

TVM's own is the same, and warns on standard error that an index beyond the end is not looked at:
torch refuses such an index, as every importer's source does, before a model runs.
"""

from __future__ import annotations

from typing import Any

from tvm import relax, te, topi


def _take(builder: Any, call: Any) -> Any:
    """The call of a function that computes ``relax.take``."""
    data, indices = call.args
    axis, mode = call.attrs.axis, str(call.attrs.mode)
    if mode != "fast" or axis is None or not isinstance(indices.ty, relax.TensorType):
        return builder.call_te(topi.take, data, indices, axis, mode=mode)
    return builder.call_te(_gathered, data, indices, int(axis), primfunc_name_hint="take")


def _gathered(data: Any, indices: Any, axis: int) -> Any:
    at = axis % len(data.shape)
    inner = len(indices.shape)
    shape = [*data.shape[:at], *indices.shape, *data.shape[at + 1 :]]

    def read(*place: Any) -> Any:
        index = indices(*place[at : at + inner])
        return data(*place[:at], index, *place[at + inner :])

    return te.compute(shape, read, name="T_take", tag=topi.tag.INJECTIVE)


#: For ``relax.transform.LegalizeOps``.
GATHER = {"relax.take": _take}
