"""A compiled model: run by TVM's virtual machine, written to a folder, and loaded."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crossfuse.calls import checked
from crossfuse.errors import (
    ArtefactRefused,
    EnvironmentRefused,
    RefusedError,
    Rule,
    WorkloadRefused,
    refuse,
)
from crossfuse.files import (
    on_disk,
    read_arrays,
    read_bytes,
    scratch,
    sha256,
    write_atomically,
    writing,
)
from crossfuse.runtime.load import check_room, gpu_limits, open_library
from crossfuse.runtime.manifest import RELEASES, releases
from crossfuse.runtime.model_record import (
    LIBRARY,
    MANIFEST,
    WEIGHTS,
    ModelArtefact,
    ModelInputs,
    model_refused,
    read_model_artefact,
)
from crossfuse.runtime.tensors import as_bits, from_bits, is_torch, to_numpy, to_torch
from crossfuse.schema import Damaged

if TYPE_CHECKING:
    import numpy as np

_refused = Rule(EnvironmentRefused, "compile-model")

# Order between torch's current stream and the stream of TVM's virtual machine.


@contextmanager
def after_torch() -> Iterator[None]:
    """Make what TVM launches inside wait for torch's current stream, and that stream for it.

    The machine launches on the default stream, and its memory pool must not be shared with other
    streams, so it stays there; torch's streams do not wait for the default one by themselves. While
    a CUDA graph is captured this raises `EnvironmentRefused`: the machine allocates memory, and the
    default stream cannot be captured.
    """
    import torch

    if not torch.cuda.is_initialized():  # nothing of torch's is on a GPU
        yield
        return
    if torch.cuda.is_current_stream_capturing():
        raise _refused(
            "torch.cuda.current_stream()",
            found="a stream that is captured as a CUDA graph",
            limit="one that runs",
            instead="compile with torch.compile(model, backend='crossfuse'), which can be captured",
        )
    current, default = torch.cuda.current_stream(0), torch.cuda.default_stream(0)
    if current == default:
        yield
        return
    default.wait_stream(current)
    try:
        yield
    finally:
        current.wait_stream(default)


def check_first_gpu(index: int) -> None:
    """Raise `WorkloadRefused` for a tensor on another GPU than 0, which the machine runs on."""
    if index:
        raise refuse(
            WorkloadRefused,
            "compile-model",
            "inputs",
            found=f"a tensor on cuda:{index}",
            limit="cuda:0, which TVM's virtual machine runs on",
            instead=f"move it, or choose the GPU by CUDA_VISIBLE_DEVICES={index}",
        )


#: Where a model runs, and what its scheduled functions are there.
RUNS_ON = ("cuda", "llvm")
#: The function that makes what ``main`` takes of the weights, if it takes anything else.
PAD_WEIGHTS = "pad_weights"


class Uncopied:
    """Base of models whose machine code lives in this process and in folders, never in copies."""

    def __reduce__(self) -> Any:
        """Refuse `copy`, `copy.deepcopy` and `pickle`."""
        raise refuse(
            ArtefactRefused,
            "compile-model",
            type(self).__name__,
            found="a copy of it, or a pickle",
            limit="one object in one process",
            instead="call this one, or write it by CompiledModel.export and read it by load_model",
        )


@dataclass(frozen=True)
class RunningModel(Uncopied):
    """A model on its device, run by TVM's virtual machine."""

    #: The ``tvm.relax.VMExecutable``, or the module that one was exported as.
    executable: Any
    inputs: ModelInputs
    #: Parameters after the inputs, in order; copied to the device once, except torch tensors that
    #: lie there. Where the model has a function that pads them, that is called once too; but at
    #: each call for torch tensors on the device, which may be changed in place.
    weights: Sequence[Any]
    #: One of `RUNS_ON`.
    runs_on: str

    def __call__(self, *inputs: Any) -> Any:
        """Run the model, see `crossfuse.compiler.CompiledModel`."""
        self.inputs.check(inputs)
        values = [self._given(each) for each in inputs]
        as_torch = bool(inputs) and is_torch(inputs[0])
        with after_torch() if as_torch and self.runs_on == "cuda" else nullcontext():
            found = self._machine["main"](*values, *self._parameters())
        if hasattr(found, "numpy"):
            return _taken(found, as_torch)
        return tuple(_taken(each, as_torch) for each in found)

    @cached_property
    def _machine(self) -> Any:
        from tvm import relax

        from crossfuse.runtime import tensors

        tensors.register()
        return relax.VirtualMachine(self.executable, self._device)

    @property
    def _device(self) -> Any:
        import tvm

        if self.runs_on == "llvm":
            return tvm.cpu()
        check_cuda()
        return tvm.cuda()

    def _parameters(self) -> Sequence[Any]:
        """What the machine's function takes behind the inputs."""
        return self._padded(self._shared) if self._shared else self._once

    @cached_property
    def _once(self) -> Sequence[Any]:
        return self._padded([self._given(each) for each in self.weights])

    @cached_property
    def _shared(self) -> Sequence[Any]:
        """All weights, if torch may change some of them where they are."""
        if any(is_torch(each) and self._shares(each) for each in self.weights):
            return [self._given(each) for each in self.weights]
        return ()

    def _padded(self, weights: Sequence[Any]) -> Sequence[Any]:
        """Weights with longer rows, where kernels take these."""
        machine = self._machine.module
        if not machine.implements_function(PAD_WEIGHTS):
            return weights
        return tuple(machine[PAD_WEIGHTS](*weights))

    def _shares(self, value: Any) -> bool:
        """Whether a tensor of torch lies where the model runs, so that it is not copied."""
        return bool(value.is_cuda) and self.runs_on == "cuda"

    def _given(self, value: Any) -> Any:
        """An argument as a tensor of TVM; what lies on the device is not copied."""
        import tvm

        if is_torch(value):
            if self._shares(value):
                check_first_gpu(value.get_device())
                return tvm.runtime.from_dlpack(value.detach())
            value = to_numpy(value)
        return tvm.runtime.tensor(value, device=self._device)


def check_cuda() -> None:
    """Raise `EnvironmentRefused` where TVM finds no GPU."""
    import tvm

    if not tvm.cuda().exist:
        raise _refused(
            "tvm.cuda()",
            found="no GPU",
            limit="a Hopper GPU, and a TVM with CUDA",
            instead="run the model there, or compile it with runs_on='llvm' to see its results",
        )


def _taken(value: Any, as_torch: bool) -> Any:
    if not as_torch:
        return value.numpy()
    if value.device.dlpack_device_type() == 2:
        import torch

        return torch.from_dlpack(value)
    return to_torch(value.numpy())


# A compiled model as a folder: written ahead of time, loaded by TVM's runtime.
#
# ::
#
#     model.so      the executable of Relax, with the host code and all kernels inside; TVM's own
# are
#                   CUDA text where there was no GPU when they were built
#     model.json    what it is for and was made with, what it is called with, what became of it
#     weights.npz   its weights, if they were written


# TVM's own CUDA compiled as our kernels are: by the same nvcc, without fast math.
#
# TVM compiles with ``--use_fast_math``: the square of a negative number is NaN, sines of large
# angles are wrong in the first digit, and denormals are zero. NVRTC, its default compiler, needs a
# package of its own besides. The text of our models is marked in its first line, so that it is
# recognised wherever TVM compiles it: while a model is built, or when it is loaded if there was no
# GPU then. Other text is compiled as before.

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
            from crossfuse.runtime.nvcc import compile_cubin

            return compile_cubin(code, arch=first.removeprefix(_MARK)).data
        return before(code)

    tvm.register_global_func(_COMPILE, compiled, override=True)
    _ours[:] = [tvm.get_global_func(_COMPILE)]


def write_model(
    folder: str | os.PathLike[str],
    executable: Any,
    record: ModelArtefact,
    weights: Mapping[str, np.ndarray],
) -> ModelArtefact:
    """Write a compiled model to a folder, which is created; gives the record with the file's hash.

    `executable` is the ``tvm.relax.VMExecutable``. A full disk, or a C++ compiler that does not
    link the library, raises `EnvironmentRefused`.
    """
    home = Path(folder)
    with on_disk(home):
        home.mkdir(parents=True, exist_ok=True)
        (home / MANIFEST).unlink(missing_ok=True)
    with scratch(home) as folder:
        made = folder / LIBRARY
        try:
            executable.export_library(str(made))
        except RuntimeError as error:  # of TVM, with what its linker says
            raise _unwritten(home, error) from error
        library = made.read_bytes()
    write_atomically(home / LIBRARY, library, mode=0o755)
    if record.stored:
        _write_weights(home / WEIGHTS, weights)
    record = replace(record, library_sha256=sha256(library))
    # Last of all: a folder that is not complete has no record.
    write_atomically(home / MANIFEST, record.to_json().encode())
    return record


@checked
def load_model(
    folder: str | os.PathLike[str],
    *,
    weights: Mapping[str, Any] | None = None,
    check_device: bool = True,
) -> RunningModel:
    """Load a model that `crossfuse.compiler.CompiledModel.export` wrote; nothing is compiled.

    Parameters
    ----------
    folder : path
        The folder.
    weights : Mapping[str, torch.Tensor | numpy.ndarray] | None
        Weights by the names in the record; those of ``weights.npz`` if not given. What torch has
        on the GPU is not copied, but for rows that kernels take with zeros behind them: these are
        copied at each call, since torch may have changed them.
    check_device : bool
        Whether a GPU that is here must have what the model was compiled for.

    Returns
    -------
    RunningModel
        Called as the model that was compiled.

    Raises
    ------
    ArtefactRefused
        If a file is missing, damaged, or of another release of TVM or tvm-ffi; if the GPU has less
        than the kernels need; or if weights are missing.
    WorkloadRefused
        For weights of other shapes and types.
    EnvironmentRefused
        If it is for a GPU, and TVM finds none.

    Examples
    --------
    >>> import torch
    >>> from tempfile import TemporaryDirectory
    >>> from crossfuse import compile_model, load_model
    >>> x = torch.zeros(4, 8)
    >>> fn = compile_model(torch.nn.Linear(8, 2).eval(), (x,), runs_on="llvm")
    >>> with TemporaryDirectory() as folder:
    ...     written = fn.export(folder)
    ...     tuple(load_model(folder)(x).shape)  # [rows, columns]
    (4, 2)
    """
    home = Path(folder)
    record = read_model_artefact(home)
    _check_releases(record, home)
    if check_device and record.runs_on == "cuda":
        check_room(str(home), record.device, record.limits, gpu_limits(), together=True)
    library = home / LIBRARY
    try:
        found = sha256(read_bytes(library))
    except Damaged as error:
        raise model_refused(str(library), error.found, "a file of the model") from None
    if found != record.library_sha256:
        raise model_refused(str(library), f"a file of hash {found}", record.library_sha256)
    given = _read_weights(home / WEIGHTS, record) if weights is None else weights
    missing = next((each.name for each in record.weights if each.name not in given), None)
    if missing is not None:
        raise model_refused(str(home), f"no weight '{missing}'", "all that the record names")
    values = tuple(given[each.name] for each in record.weights)
    ModelInputs(record.weights, {}).check(values)
    if record.runs_on == "cuda":
        check_cuda()  # TVM has no reader for what is inside then
        compile_marked_text()  # which is there where no GPU was when it was built
    import tvm  # noqa: F401  # which knows executables of Relax

    inputs = ModelInputs(record.inputs, record.most)
    return RunningModel(open_library(library.resolve()), inputs, values, record.runs_on)


def _check_releases(record: ModelArtefact, home: Path) -> None:
    """Refuse another TVM, which reads the executable, or tvm-ffi, which its calls go through."""
    installed = releases()
    for name in ("tvm", "tvm-ffi"):
        built, here = record.versions.get(name), installed[name]
        if built != here:
            found, limit = f"a model of {RELEASES[name]} {built}", f"{here}, which is installed"
            raise model_refused(str(home), found, limit)


def _write_weights(path: Path, weights: Mapping[str, Any]) -> None:
    """Write weights; types of ml_dtypes travel as integers."""
    import numpy as np

    with writing(path) as file:
        np.savez(file, *map(as_bits, weights.values()))  # by number: a name may be any text


def _unwritten(home: Path, error: RuntimeError) -> RefusedError:
    return refuse(
        EnvironmentRefused,
        "model-export",
        str(home),
        found=str(error).strip(),
        limit="a library that the C++ compiler links",
        instead="make space there and in TMPDIR, or repair the compiler",
    )


def _read_weights(path: Path, record: ModelArtefact) -> dict[str, Any]:
    if not record.weights:
        return {}
    if not record.stored:
        raise model_refused(str(path), "a model without its weights", "weights=, one for each name")
    names = [f"arr_{at}" for at in range(len(record.weights))]
    shapes = dict(zip(names, (each.extents for each in record.weights), strict=True))
    try:
        found = read_arrays(path, names, shapes)
        return {
            each.name: from_bits(found[name], each.dtype)
            for name, each in zip(names, record.weights, strict=True)
        }
    except (Damaged, ValueError, KeyError) as error:  # of numpy, where types have other sizes
        fault = error.found if isinstance(error, Damaged) else f"{type(error).__name__}: {error}"
        raise model_refused(str(path), fault, "the weights that the record names") from None
