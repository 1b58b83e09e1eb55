"""A model that TVM's virtual machine runs: compiled in this process, or loaded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from crossfuse.errors import ArtefactRefused, EnvironmentRefused, Rule, WorkloadRefused, refuse
from crossfuse.runtime.model_record import ModelInputs
from crossfuse.runtime.tensors import is_torch, to_numpy, to_torch

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

        from crossfuse.runtime import torch_operator

        torch_operator.register()
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
