"""Entry point of group ``tvm.backends``: TVM calls `register` at the end of ``import tvm``.

So every process that imports TVM, workers of a tuner too, has the primitives, the pipeline, the
operators of `crossfuse.lower.hidden`, and wgmma as a dispatch of TIRx's `gemm_async`.
All are stand-ins that load the project when they are first used: ``import tvm`` stays as fast as
it was, and may happen inside an import of ours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def register() -> None:
    """Install primitives, pipeline, operators and the dispatch of products; idempotent.

    A runtime-only TVM has neither schedules nor pipelines, and nothing is done.
    """
    import tvm

    if getattr(tvm, "_RUNTIME_ONLY", False):
        return
    from crossfuse.schedule.install import install

    install()
    _install_pipeline()
    _install_extremes()
    _install_gemm_async()


def _install_pipeline() -> None:
    """Take the place of `s_tir`'s default pipeline, and register ours by name too."""
    from tvm.s_tir import pipeline as _default  # noqa: F401  (registers TVM's own first)
    from tvm.tirx import compilation_pipeline

    registered = compilation_pipeline.PIPELINE_MAP
    stock = registered["s_tir"]
    if hasattr(stock, "crossfuse_wraps"):
        return

    def factory() -> Any:
        from crossfuse.lower.pipeline import make_pipeline

        return make_pipeline(stock)

    factory.crossfuse_wraps = stock  # type: ignore[attr-defined]
    compilation_pipeline.register_tir_pipeline("crossfuse", factory)
    registered["s_tir"] = factory


def _install_extremes() -> None:
    """Register maxima and minima that keep NaN, and what they become on a target."""
    from tvm.ir import Op, register_op_attr
    from tvm.tirx import CallEffectKind
    from tvm.tirx.op import register_intrin_lowering

    for name in ("crossfuse_maximum", "crossfuse_minimum"):
        full = f"tirx.{name}"
        if full in Op.list_op_names():
            continue
        register_op_attr(full, "TCallEffectKind", int(CallEffectKind.Pure.value))
        register_op_attr(full, "TVectorizable", True)
        register_op_attr(full, "TScriptPrinterName", name)
        for target, rule in _EXTREMES.items():
            register_intrin_lowering(full, target=target, f=rule)


def _extreme(rule: str) -> Callable[[Any], Any]:
    """A function of `crossfuse.lower.hidden` that is loaded when it is first called."""

    def lower(call: Any) -> Any:
        from crossfuse.lower import hidden

        return getattr(hidden, rule)(call)

    return lower


#: What lowers maxima and minima, by target.
_EXTREMES = {
    name: _extreme(rule)
    for name, rule in (("cuda", "on_cuda"), ("llvm", "on_llvm"), ("default", "elsewhere"))
}


def _install_gemm_async() -> None:
    """Offer wgmma for TIRx's tile primitive `gemm_async`, which TVM has for Blackwell alone."""
    from tvm.tirx.operator.tile_primitive import fail, predicate, register_dispatch
    from tvm.tirx.operator.tile_primitive.dispatcher import list_registered_schedules

    if "wgmma" in list_registered_schedules().get("tirx.tile.gemm_async", {}).get("cuda", []):
        return

    def on_hopper(_call: Any, context: Any) -> Any:
        from crossfuse.lower.hopper.gemm_async import is_hopper

        return is_hopper(context)

    def lower(call: Any, context: Any) -> Any:
        from crossfuse.errors import LoweringRefused
        from crossfuse.lower.hopper.gemm_async import lower_gemm_async

        try:
            return lower_gemm_async(call, context)
        except LoweringRefused as refused:
            fail(str(refused))

    register_dispatch(
        "gemm_async", "cuda", variant="wgmma", priority=20, when=[predicate("sm_90a", on_hopper)]
    )(lower)
