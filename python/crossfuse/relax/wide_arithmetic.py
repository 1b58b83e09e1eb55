"""What no kernel of ours computes, in float32 and rounded once, as torch and cuBLAS do it."""

from __future__ import annotations

from typing import Any

from tvm import relax

from crossfuse import _tvm as ir

#: Types whose sums TVM would take in the type itself.
_NARROW = ("float16", "bfloat16")
_PRODUCTS = ("relax.matmul", "relax.nn.conv2d")
#: What TVM does not legalise in bfloat16, or sorts by its bits.
_NEVER_BFLOAT16 = (
    *("relax.power", "relax.topk", "relax.sort", "relax.argsort", "relax.argmax", "relax.argmin"),
)
#: What TVM approximates by polynomials of the type itself: a tanh of float16 was off by five units
#: in the last place.
_APPROXIMATED = (
    *("relax.tan", "relax.tanh", "relax.sigmoid", "relax.erf"),
    *("relax.nn.gelu", "relax.nn.gelu_tanh", "relax.nn.silu"),
)
#: What TVM adds or multiplies up in the type itself: of 4096 terms, a softmax of float16 was off by
#: a quarter, and a sum of bfloat16 by seven eighths.
_ACCUMULATED = (
    *("relax.sum", "relax.mean", "relax.variance", "relax.std", "relax.prod"),
    *("relax.cumsum", "relax.cumprod", "relax.einsum"),
    *("relax.nn.softmax", "relax.nn.log_softmax"),
    *("relax.nn.layer_norm", "relax.nn.group_norm", "relax.nn.instance_norm"),
    *(f"relax.nn.{kind}avg_pool{n}d" for kind in ("", "adaptive_") for n in (1, 2, 3)),
    *(f"relax.nn.conv{kind}" for kind in ("1d", "3d", "1d_transpose", "2d_transpose")),
)
_NEVER_NARROW = (*_APPROXIMATED, *_ACCUMULATED)
_OF_CONVOLUTIONS = (
    *("strides", "padding", "dilation", "groups"),
    *("data_layout", "kernel_layout", "out_layout"),
)


@ir.tvm.ir.transform.module_pass(opt_level=0, name="crossfuse.WideArithmetic")
class WideArithmetic:
    """Let what adds or approximates 2-byte floats work in float32, and round once in the end.

    A pass over modules before ``LegalizeOps``, which would otherwise add in the type of the result:
    a sum of 2048 terms in bfloat16 keeps one digit. dlight's tensor-core schedules take both.
    Activations, sums, softmaxes, norms and pools are computed in float32 too, and of bfloat16 also
    what ``LegalizeOps`` refuses or compares by its bits: powers, and all that sorts.
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
        narrow = [each for argument in call.args for each in _narrow(argument.ty)]
        if (name in _NEVER_BFLOAT16 and "bfloat16" in narrow) or (name in _NEVER_NARROW and narrow):
            return self._in_float32(call)
        if name not in _PRODUCTS:
            return call
        dtype, given = str(call.ty.dtype), {str(each.ty.dtype) for each in call.args}
        if dtype not in _NARROW or given != {dtype}:
            return call
        return relax.op.astype(self.builder_.emit(_wide(call)), dtype)

    def _in_float32(self, call: Any) -> Any:
        given = [self._cast(each, "float32") for each in call.args]
        result = self.builder_.emit(relax.Call(call.op, given, call.attrs, call.ty_args))
        # Indices beside the values stay as they are.
        types = _narrow(call.ty)
        return self._cast(result, types[0]) if types else result

    def _cast(self, value: Any, dtype: str) -> Any:
        """A tensor, or those of a tuple, in another type if they are floats."""
        if isinstance(value.ty, relax.TupleType):
            if not isinstance(value, relax.Tuple):
                count = range(len(value.ty.fields))
                value = [self.builder_.emit(relax.TupleGetItem(value, each)) for each in count]
            return relax.Tuple([self._cast(each, dtype) for each in value])
        if str(value.ty.dtype) not in (*_NARROW, "float32"):
            return value
        return self.builder_.emit(relax.op.astype(value, dtype))


def _narrow(type_: Any) -> list[str]:
    """2-byte floats among the types of a tensor or of a tuple of them."""
    if isinstance(type_, relax.TupleType):
        return [name for each in type_.fields for name in _narrow(each)]
    dtype = str(type_.dtype) if isinstance(type_, relax.TensorType) else ""
    return [dtype] if dtype in _NARROW else []


def _wide(call: Any) -> Any:
    """The same product with a result of float32."""
    if call.op.name == "relax.matmul":
        return relax.op.matmul(*call.args, out_dtype="float32")
    options = {name: getattr(call.attrs, name) for name in _OF_CONVOLUTIONS}
    return relax.op.nn.conv2d(*call.args, **options, out_dtype="float32")
