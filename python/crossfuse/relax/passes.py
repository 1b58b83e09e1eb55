"""Passes over Relax functions, and rewrites of functions of loops, before kernels are sought."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import relax, te, tirx, topi
from tvm.ir import GenericConst

from crossfuse import _tvm as ir
from crossfuse.relax.operators import refused

# Attention as a TIR function whose sums are in float32, for ``LegalizeOps``.
#
# TVM's own adds in the type of the operands, and takes the maximum of causal scores together with
# zeros in the place of those that are masked: far below zero all that is left underflows.

#: Types whose sums are in float32.
_NARROW = ("float16", "bfloat16")


def _attention(builder: Any, call: Any) -> Any:
    """Legalise ``relax.nn.attention``, with or without a bias."""
    if call.attrs.window_size is not None:
        from tvm.relax.transform.legalize_ops.nn import _nn_attention

        return _nn_attention(builder, call)  # which says that it has none
    q, k, v, *bias = call.args
    name = str(call.op.name).rpartition(".")[2]
    options = (call.attrs.scale, call.attrs.causal_mask)
    return builder.call_te(_expressions, q, k, v, bias, *options, primfunc_name_hint=name)


def _expressions(
    q: Any, k: Any, v: Any, bias: list[Any], scale: Any, causal: str | None
) -> te.Tensor:
    """Attention of [batch, rows, heads, depth]; a bias is [batch, heads, rows, keys]."""
    dtype = str(q.dtype)
    wide = "float32" if dtype in _NARROW else dtype
    depth, offset = q.shape[-1], 0 if causal == "TopLeft" else k.shape[1] - q.shape[1]
    q, k, v = (topi.transpose(each, [0, 2, 1, 3]) for each in (q, k, v))
    scores = _product(q, topi.transpose(k, [0, 1, 3, 2]), wide)
    factor = int(depth) ** -0.5 if scale is None else float(scale)
    scores = topi.multiply(scores, tirx.const(factor, wide))
    for each in bias:
        scores = topi.add(scores, topi.cast(each, wide))
    if causal is not None:
        least = tirx.min_value(wide)
        scores = te.compute(
            scores.shape,
            lambda b, h, i, j: tirx.if_then_else(j <= i + offset, scores[b, h, i, j], least),
            name="causal",
        )
    chances = topi.cast(topi.nn.softmax(scores, axis=-1), dtype)
    return topi.transpose(topi.cast(_product(chances, v, wide), dtype), [0, 2, 1, 3])


def _product(left: te.Tensor, right: te.Tensor, wide: str) -> te.Tensor:
    """``left @ right`` of each head, summed in the type `wide`."""
    batch, heads, rows, length = left.shape
    at = te.reduce_axis((0, length), name="k")
    return te.compute(
        (batch, heads, rows, right.shape[-1]),
        lambda b, h, i, j: te.sum(
            left[b, h, i, at].astype(wide) * right[b, h, at, j].astype(wide), axis=at
        ),
        name="product",
    )


#: For ``LegalizeOps``, by operator.
ATTENTION = dict.fromkeys(("relax.nn.attention", "relax.nn.attention_bias"), _attention)


# Operators left to TVM work in float32 and round once, as in torch and cuBLAS.

_PRODUCTS = ("relax.matmul", "relax.nn.conv2d")
#: Operators that TVM does not legalise in bfloat16, or that compare its bits to sort.
_NEVER_BFLOAT16 = (
    *("relax.power", "relax.mod", "relax.topk", "relax.sort", "relax.argsort"),
    *("relax.argmax", "relax.argmin"),
)
#: Operators that TVM approximates by polynomials in the type itself: a tanh of float16 was off by
#: five units in the last place. Of the others it has no float16 at all.
_APPROXIMATED = (
    *("relax.tan", "relax.tanh", "relax.sigmoid", "relax.erf"),
    *("relax.sinh", "relax.cosh", "relax.asinh", "relax.acosh", "relax.atanh"),
    *("relax.asin", "relax.acos", "relax.atan", "relax.atan2"),
    *("relax.nn.gelu", "relax.nn.gelu_tanh", "relax.nn.silu"),
)
#: Operators that TVM accumulates in the type itself: of 4096 terms, a softmax of float16 was off by
#: a quarter, and a sum of bfloat16 by seven eighths.
_ACCUMULATED = (
    *("relax.sum", "relax.mean", "relax.variance", "relax.std", "relax.prod"),
    *("relax.cumsum", "relax.cumprod", "relax.einsum"),
    *("relax.nn.softmax", "relax.nn.log_softmax"),
    *("relax.nn.layer_norm", "relax.nn.group_norm", "relax.nn.instance_norm"),
    "relax.nn.batch_norm",
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
    """Compute sums and approximations of 2-byte floats in float32, and round once in the end.

    A pass over modules before ``LegalizeOps``, which would otherwise add in the type of the result:
    a sum of 2048 terms in bfloat16 keeps one digit. dlight's tensor-core schedules accept both.
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
    """Rewrites the operators of a function that work in 2-byte floats."""

    def visit_call_(self, call: Any) -> Any:
        """A product with sums in float32 and a cast behind it; others wholly in float32."""
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
        """A tensor, or those of a tuple, cast to another type if they are floats."""
        if isinstance(value.ty, relax.TupleType):
            if not isinstance(value, relax.Tuple):
                count = range(len(value.ty.fields))
                value = [self.builder_.emit(relax.TupleGetItem(value, each)) for each in count]
            return relax.Tuple([self._cast(each, dtype) for each in value])
        if str(value.ty.dtype) not in (*_NARROW, "float32"):
            return value
        if isinstance(value, GenericConst):
            # ``LegalizeOps`` would bind what is cast, which is a call of nothing.
            return relax.const(value.value.numpy().astype(dtype), dtype)
        return self.builder_.emit(relax.op.astype(value, dtype))


def _narrow(type_: Any) -> list[str]:
    """2-byte floats among the types of a tensor or of a tuple of tensors."""
    if isinstance(type_, relax.TupleType):
        return [name for each in type_.fields for name in _narrow(each)]
    dtype = str(type_.dtype) if isinstance(type_, relax.TensorType) else ""
    return [dtype] if dtype in _NARROW else []


def _wide(call: Any) -> Any:
    if call.op.name == "relax.matmul":
        return relax.op.matmul(*call.args, out_dtype="float32")
    options = {name: getattr(call.attrs, name) for name in _OF_CONVOLUTIONS}
    return relax.op.nn.conv2d(*call.args, **options, out_dtype="float32")


# Extents of one are dropped, so that a batch of one sequence is a matrix of its rows.


def without_unit_extents(func: Any) -> Any:
    """The same function of tensors and loops without extents of one.

    It takes static shapes and an unscheduled function in s_tir form. Tensors have the same elements
    in the same order; one of one element keeps its last extent. Indices are simplified: a reshape
    to what is the same matrix then is a plain copy.
    """
    return _Rewriter(func).function()


class _Rewriter:
    """Replaces the tensors of a function by ones without extents of one, and their accesses."""

    def __init__(self, func: Any) -> None:
        self.func = func
        buffers = list(func.params)
        ir.walk(func.body, (ir.SBlock, lambda block: buffers.extend(block.alloc_buffers)))
        self.images = {
            each: ir.tirx.decl_buffer(_kept(each, each.ty.shape), each.ty.dtype, str(each.name))
            for each in buffers
        }
        self.first, self.known = _unit_variables(func)

    def function(self) -> Any:
        """The rewritten function."""
        func = self.func
        body = ir.mutate(
            func.body,
            (ir.Var, self._value),
            (ir.TensorLoad, self._load),
            (ir.BufferStore, self._store),
            (ir.For, self._loop),
            (ir.SBlockRealize, self._realize),
        )
        params = [self.images[each] for each in func.params]
        return ir.PrimFunc(params, body, func.ret_type, func.attrs)

    def _value(self, var: Any, _mutator: Any) -> Any:
        return self.first.get(var, var)

    def _load(self, node: Any, mutator: Any) -> Any:
        node = mutator.default_mutate(node)
        return self.images[node.source][tuple(self._simple(node.indices, node.source))]

    def _store(self, node: Any, mutator: Any) -> Any:
        node = mutator.default_mutate(node)
        indices = self._simple(node.indices, node.buffer)
        return ir.BufferStore(self.images[node.buffer], node.value, indices)

    def _loop(self, node: Any, mutator: Any) -> Any:
        if node.loop_var not in self.first:
            return mutator.default_mutate(node)
        return mutator.mutate(node.body)

    def _realize(self, node: Any, mutator: Any) -> Any:
        block = node.block
        pairs = zip(block.iter_vars, node.iter_values, strict=True)
        kept = [(each, at) for each, at in pairs if each.var not in self.first]
        made = ir.block_like(
            block,
            iter_vars=[each for each, _ in kept],
            reads=self._regions(block.reads, mutator),
            writes=self._regions(block.writes, mutator),
            alloc_buffers=[self.images[each] for each in block.alloc_buffers],
            init=None if block.init is None else mutator.mutate(block.init),
            body=mutator.mutate(block.body),
        )
        return ir.SBlockRealize([mutator.mutate(at) for _, at in kept], node.predicate, made)

    def _regions(self, given: Any, mutator: Any) -> list[Any]:
        ranges = [[mutator.mutate(r) for r in _kept(e.source, e.region)] for e in given]
        pairs = zip(given, ranges, strict=True)
        return [ir.tirx.BufferRegion(self.images[each.source], place) for each, place in pairs]

    def _simple(self, indices: Any, buffer: Any) -> list[Any]:
        return [self.known.simplify(each) for each in _kept(buffer, indices)]


def _kept(buffer: Any, values: Any) -> list[Any]:
    """Of values that belong to a buffer's extents, those of extents other than one."""
    pairs = list(zip(buffer.ty.shape, values, strict=True))
    return [value for extent, value in pairs if int(extent) != 1] or [pairs[-1][1]]


def _unit_variables(func: Any) -> tuple[dict[Any, Any], Any]:
    """Loop and block variables of one value, with it; and an analyzer that knows all domains."""
    found: dict[Any, Any] = {}
    known = ir.sym.Analyzer()

    def block(node: Any) -> None:
        for each in node.iter_vars:
            known.bind(each.var, each.dom)
            if ir.constant(each.dom.extent) == 1:
                found[each.var] = each.dom.min

    def loop(node: Any) -> None:
        if ir.constant(node.extent) == 1:
            found[node.loop_var] = node.min

    ir.walk(func.body, (ir.SBlock, block), (ir.For, loop))
    return found, known


# Proof that each row of a function's result is made of the same row of what it is given.
#
# Kernels of symbolic rows are planned for a batch of one: what goes along the batch, such as a
# softmax or a transposition, does nothing there. So rows are followed through the function at a
# size in which no symbol is one.


def check_row_wise(func: Any, given: Sequence[bool], rows: int) -> None:
    """Refuse a function in which a row of a result depends on another row of an input.

    It takes static shapes and an unscheduled function in s_tir form. `given` tells which inputs
    have rows; `rows` is how many: the leading extents of a tensor multiplied.
    """
    inputs = func.params[: len(given)]
    known, by_row = ir.sym.Analyzer(), {p for p, has in zip(inputs, given, strict=True) if has}
    blocks: list[Any] = []
    ir.walk(func.body.block.body, (ir.SBlock, blocks.append))
    for block in blocks:
        for each in block.iter_vars:
            known.bind(each.var, each.dom)
        stores: list[Any] = []
        ir.walk(block, (ir.BufferStore, stores.append))
        loads = [each for each in ir.buffer_loads(*_parts(block)) if each.source in by_row]
        for store in stores if loads else ():
            due = _row(store.buffer, store.indices, rows)
            for load in loads:
                found = _row(load.source, load.indices, rows)
                if due is None or found is None or not known.can_prove_equal(due, found):
                    raise refused(
                        f"block '{block.name_hint}'",
                        f"'{load.source.name}{list(load.indices)}' for "
                        f"'{store.buffer.name}{list(store.indices)}'",
                        "the same row of all that has rows, leading extents together",
                        "leave the model unfused, or give it one number of rows",
                    )
            by_row.add(store.buffer)


def _parts(block: Any) -> list[Any]:
    return [block.body] if block.init is None else [block.body, block.init]


def _row(buffer: Any, indices: Sequence[Any], rows: int) -> Any:
    """The row number of an access; None if the leading extents do not count `rows` rows."""
    place, count = ir.tirx.const(0, "int32"), 1
    for extent, index in zip(buffer.ty.shape, indices, strict=True):
        if count == rows:
            break
        place, count = place * int(extent) + index, count * int(extent)
    return place if count == rows else None
