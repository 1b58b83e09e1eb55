"""What no kernel of ours computes, with sums in float32 as torch and cuBLAS take them."""

from __future__ import annotations

from typing import Any

from tvm import relax

from crossfuse import _tvm as ir

#: Types whose sums TVM would take in the type itself.
_NARROW = ("float16", "bfloat16")
_PRODUCTS = ("relax.matmul", "relax.nn.conv2d")
#: What TVM does not legalise in bfloat16.
_NEVER_BFLOAT16 = ("relax.power", "relax.nn.layer_norm", "relax.nn.group_norm")
_OF_CONVOLUTIONS = (
    *("strides", "padding", "dilation", "groups"),
    *("data_layout", "kernel_layout", "out_layout"),
)


@ir.tvm.ir.transform.module_pass(opt_level=0, name="crossfuse.WideSums")
class WideSums:
    """Let products of 2-byte floats add in float32, and round once in the end.

    A pass over modules before ``LegalizeOps``, which would otherwise add in the type of the result:
    a sum of 2048 terms in bfloat16 keeps one digit. dlight's tensor-core schedules take both. Norms
    and powers of bfloat16, which ``LegalizeOps`` refuses, are computed in float32 too.
    """

    def transform_module(self, mod: Any, _context: Any) -> Any:
        """See `WideSums`."""
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
        if name in _NEVER_BFLOAT16:
            return self._in_float32(call)
        if name not in _PRODUCTS:
            return call
        dtype, given = str(call.ty.dtype), {str(each.ty.dtype) for each in call.args}
        if dtype not in _NARROW or given != {dtype}:
            return call
        return relax.op.astype(self.builder_.emit(_wide(call)), dtype)

    def _in_float32(self, call: Any) -> Any:
        if str(call.ty.dtype) != "bfloat16":
            return call
        given = [self.builder_.emit(relax.op.astype(each, "float32")) for each in call.args]
        result = self.builder_.emit(relax.Call(call.op, given, call.attrs, call.ty_args))
        return relax.op.astype(result, "bfloat16")


def _wide(call: Any) -> Any:
    """The same product with a result of float32."""
    if call.op.name == "relax.matmul":
        return relax.op.matmul(*call.args, out_dtype="float32")
    options = {name: getattr(call.attrs, name) for name in _OF_CONVOLUTIONS}
    return relax.op.nn.conv2d(*call.args, **options, out_dtype="float32")
