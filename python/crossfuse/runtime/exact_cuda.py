"""TVM's own CUDA compiled as our kernels are: by the same nvcc, without fast math.

TVM compiles with ``--use_fast_math``: the square of a negative number is NaN, sines of large angles
are wrong in the first digit, and denormals are zero. NVRTC, its default compiler, needs a package
of its own besides. The text of our models is marked in its first line, so that it is recognised
wherever TVM compiles it: while a model is built, or when it is loaded if there was no GPU then.
Other text is compiled as before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_MARK = "// crossfuse: without fast math, for "
#: What TVM calls with all CUDA text that it compiles, and with what it has written.
_COMPILE, _WRITTEN = "tvm_callback_cuda_compile", "tvm_callback_cuda_postproc"
#: The function that was put in the place of TVM's, once there is one.
_ours: list[Any] = []


@contextmanager
def exact_cuda(arch: str) -> Iterator[None]:
    """Have CUDA text that TVM writes inside compiled for `arch` without fast math.

    The hook that marks the text is restored at the end; the one that compiles it stays, since
    marked text may be compiled later.
    """
    import tvm
    import tvm_ffi

    compile_marked_text()
    before = tvm.get_global_func(_WRITTEN, allow_missing=True)

    def marked(code: str, target: Any) -> str:
        text = before(code, target) if before is not None else code
        return f"{_MARK}{arch}\n{text}"

    tvm.register_global_func(_WRITTEN, marked, override=True)
    try:
        yield
    finally:
        if before is None:
            tvm_ffi.remove_global_func(_WRITTEN)
        else:
            tvm.register_global_func(_WRITTEN, before, override=True)


def compile_marked_text() -> None:
    """Have TVM compile marked text by `crossfuse.runtime.compile_cubin`, other text as before."""
    import tvm
    import tvm.support.nvcc  # TVM's own function has to be there before it is replaced

    before = tvm.get_global_func(_COMPILE)
    if any(before.same_as(each) for each in _ours):
        return

    def compiled(code: str) -> Any:
        first, _, _ = code.partition("\n")
        if first.startswith(_MARK):
            from crossfuse.runtime.cubin import compile_cubin

            return compile_cubin(code, arch=first.removeprefix(_MARK)).data
        return before(code)

    tvm.register_global_func(_COMPILE, compiled, override=True)
    _ours[:] = [tvm.get_global_func(_COMPILE)]
