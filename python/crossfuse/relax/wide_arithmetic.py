"""What no kernel of ours computes, in float32 and rounded once, as torch and cuBLAS do it."""

from __future__ import annotations

from typing import Any

from tvm import relax

from crossfuse import _tvm as ir

#: Types whose sums TVM would take in the type itself.
_NARROW = ("float16", "bfloat16")
_PRODUCTS = ("relax.matmul", "relax.nn.conv2d")
#: What TVM does not legalise in bfloat16.
_NEVER_BFLOAT16 = ("relax.power", "relax.nn.layer_norm", "relax.nn.group_norm")
#: What TVM approximates by polynomials of the type itself: a tanh of float16 was off by five units
#: in the last place.
_NEVER_NARROW = (
    *("relax.tanh", "relax.sigmoid", "relax.erf"),
    *("relax.nn.gelu", "relax.nn.gelu_tanh", "relax.nn.silu"),
)
_OF_CONVOLUTIONS = (
    *("strides", "padding", "dilation", "groups"),
    *("data_layout", "kernel_layout", "out_layout"),
)


@ir.tvm.ir.transform.module_pass(opt_level=0, name="crossfuse.WideArithmetic")
class WideArithmetic:
    """Let what adds or approximates 2-byte floats work in float32, and round once in the end.

    A pass over modules before ``LegalizeOps``, which would otherwise add in the type of the result:
    a sum of 2048 terms in bfloat16 keeps one digit. dlight's tensor-core schedules take both.
    Activations are computed in float32 too, and so are norms and powers of bfloat16, which
    ``LegalizeOps`` refuses.
    """

    def transform_module(self, mod: Any, _context: Any) -> Any:
        """See `WideArithmetic`."""
        made = mod.clone()
        for name, function in mod.functions_items():
            if isinstance(function, relax.Function):
                made.update_func(name, _Widened(mod).visit_expr(function))
        return made


@relax.expr_functor.mutator
class _Widened(relax.PyExprMutator):
    """Rewrites the products of a function."""

    def visit_call_(self, call: Any) -> Any:
        """A product with its sums in float32, and a cast behind it."""
        call = self.visit_expr_post_order(call)
        name = getattr(call.op, "name", "")
        narrow = str(call.ty.dtype) if isinstance(call.ty, relax.TensorType) else ""
        if (name in _NEVER_BFLOAT16 and narrow == "bfloat16") or (
            name in _NEVER_NARROW and narrow in _NARROW
        ):
            return self._in_float32(call)
        if name not in _PRODUCTS:
            return call
        dtype, given = str(call.ty.dtype), {str(each.ty.dtype) for each in call.args}
        if dtype not in _NARROW or given != {dtype}:
            return call
        return relax.op.astype(self.builder_.emit(_wide(call)), dtype)

    def _in_float32(self, call: Any) -> Any:
        given = [self.builder_.emit(relax.op.astype(each, "float32")) for each in call.args]
        result = self.builder_.emit(relax.Call(call.op, given, call.attrs, call.ty_args))
        return relax.op.astype(result, str(call.ty.dtype))


def _wide(call: Any) -> Any:
    """The same product with a result of float32."""
    if call.op.name == "relax.matmul":
        return relax.op.matmul(*call.args, out_dtype="float32")
    options = {name: getattr(call.attrs, name) for name in _OF_CONVOLUTIONS}
    return relax.op.nn.conv2d(*call.args, **options, out_dtype="float32")
