"""What is timed: a workload in one way; and the least time that its bytes and operations take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any

from crossfuse.errors import RefusedError, WorkloadRefused, refuse
from crossfuse.hardware import DEVICES, Device, device
from crossfuse.measure.job import Job, Timing
from crossfuse.planner.cost.rates import rates_of
from crossfuse.planner.families.registry import FAMILIES
from crossfuse.workload.dtypes import Operand, float_type
from crossfuse.workload.spec import WorkloadSpec

if TYPE_CHECKING:
    from crossfuse.runtime.manifest import ResourceUsage

OURS = "ours"
#: Of models: our kernels, and torch eager for all else.
OURS_EAGER = "ours-eager"
#: Of models: our kernels, and inductor with autotuning for all else.
OURS_AUTOTUNE = "ours-autotune"
#: Our kernels with the intermediate of a chain placed, by name.
_PLACED = {
    f"{OURS}-{place}": (place, text)
    for family in reversed(tuple(FAMILIES.values()))
    for place, text in family.placements.items()
}
#: Our kernels, and where each keeps the intermediate of a chain; None leaves it to the planner.
OWN: dict[str, str | None] = {
    **dict.fromkeys((OURS, OURS_EAGER, OURS_AUTOTUNE)),
    **{name: place for name, (place, _) in _PLACED.items()},
}
#: Those that only models have.
OF_MODELS = (OURS_EAGER, OURS_AUTOTUNE)
#: Name and meaning of every way to compute a workload.
VARIANTS = {
    OURS: "the fused kernel, where and with the tiles that the planner chooses; of models all that "
    "are fused, the rest of the graph by inductor",
    OURS_EAGER: "of models: our kernels, the rest of the graph by torch eager",
    OURS_AUTOTUNE: "of models: our kernels, the rest of the graph by inductor with "
    "max-autotune-no-cudagraphs",
    **{name: text for name, (_, text) in _PLACED.items()},
    "unfused": "our own kernels, one for each product; of a norm and the feed-forward block behind "
    "it one for either",
    "eager": "PyTorch eager (cuBLAS), weights of gate and up concatenated",
    "eager-apart": "PyTorch eager (cuBLAS), weights of gate and up apart",
    "compile": "torch.compile, default mode: the baseline of the paper's protocol",
    "autotune": "torch.compile, max-autotune-no-cudagraphs",
    "sdpa-flash": "PyTorch's attention with the FlashAttention backend",
    "sdpa-cudnn": "PyTorch's attention with the cuDNN backend",
    "sdpa-efficient": "PyTorch's attention with the memory-efficient backend, of any width",
    "quack": "QuACK's kernel of a softmax, cross entropy or norm of rows",
    "scaled-mm": "torch._scaled_mm (cuBLASLt) on 8-bit floats, accumulated in float32",
    "scaled-mm-fast": "the same with use_fast_accum: in the tensor core's fewer bits",
}
#: Modes of ``torch.compile`` by variant. Whoever measures captures CUDA graphs, for all alike.
COMPILE_MODES: dict[str, str | None] = {"compile": None, "autotune": "max-autotune-no-cudagraphs"}
L2 = {
    "cold": "weights not in the L2 cache",
    "hot": "one set of weights, left in the L2 cache where it fits",
}
PROTOCOLS = {
    "graph": "replayed from a CUDA graph",
    "stream": "launched one by one, no CUDA graph: the paper's protocol",
}


def pack_apart(weights: Mapping[str, Any]) -> tuple[Any, ...]:
    """Copy every weight as it is, also its strides, in the order of the mapping."""
    import torch

    return tuple(
        torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device=each.device).copy_(
            each
        )
        for each in weights.values()
    )


@dataclass(frozen=True)
class Variant:
    """One way to compute a workload on torch tensors."""

    #: Launches the computation on the current stream: ``call(A, *tensors of a set)``, of a cascade
    #: ``call(*inputs)``, gives the output or outputs, which a later call may overwrite.
    call: Callable[..., Any]
    #: What is run, for the record.
    note: str = ""
    #: What ptxas said of each kernel of ours; empty for a baseline.
    resources: tuple[ResourceUsage, ...] = ()
    #: Makes of the weights by name the tensors of one set, as `call` takes them.
    pack: Callable[[Mapping[str, Any]], tuple[Any, ...]] = pack_apart
    #: Weights of its own, which `call` takes after all inputs.
    weights: tuple[Any, ...] = ()
    #: Whether it is launched one by one where no CUDA graph takes it.
    streams: bool = False


def no_such(name: str, spec: object, limit: str, instead: str) -> RefusedError:
    """Build the refusal of a variant that a workload does not have, to be raised."""
    return refuse(WorkloadRefused, "bench", name, found=str(spec), limit=limit, instead=instead)


@dataclass(frozen=True)
class Counters:
    """Memory traffic of one computation, summed over its kernels."""

    #: ``ok``; ``refused`` where the machine does not let them be read, ``failed`` or ``timeout``.
    #: No fault of the row: its time stands.
    status: str
    #: Why some are missing.
    message: str = ""
    #: Between memory and the L2 cache. Results that are still in the cache when the last kernel
    #: ends are not written yet, so that less than what is compulsory may be counted.
    dram_read_bytes: int | None = None
    dram_write_bytes: int | None = None
    #: What arrived at the SMs from the crossbar: a multicast counts once for each SM, and what
    #: comes from the shared memory of another SM counts too.
    l2_to_sm_bytes: int | None = None
    #: Of all requests to the L2 cache, reads and writes.
    l2_bytes: int | None = None
    #: Sum over the kernels, which run one after another while counters are read.
    microseconds: float | None = None
    #: Names, in the order of launch.
    kernels: tuple[str, ...] = ()
    #: The most often that a kernel was run to read the traffic of the memory.
    passes: int = 0

    @property
    def dram_bytes(self) -> int | None:
        """Bytes between memory and the L2 cache, in both directions."""
        if self.dram_read_bytes is None or self.dram_write_bytes is None:
            return None
        return self.dram_read_bytes + self.dram_write_bytes


@dataclass(frozen=True)
class Planned:
    """A job and its place in a table."""

    #: The workload as it was asked for, without its rows.
    label: str
    #: Extent M.
    rows: int
    #: Roofline in microseconds, see `crossfuse.bench.job`.
    floor: float
    job: Job
    #: Bytes that have to be moved, see `crossfuse.bench.job`.
    compulsory: int = 0

    def to_json(self) -> dict[str, Any]:
        """The job and its roofline as a value that `json` can write."""
        head = {"workload": self.label, "M": self.rows, "floor_microseconds": self.floor}
        head["compulsory_bytes"] = self.compulsory
        return head | {"job": asdict(self.job)}


@dataclass(frozen=True)
class Row:
    """A planned job and its outcome, with counters where they were asked for."""

    planned: Planned
    timing: Timing
    counters: Counters | None = None

    @property
    def ratio(self) -> float | None:
        """Time over the roofline; None without a time."""
        time = self.timing.microseconds
        return None if time is None else time / self.planned.floor

    @property
    def dram_over_compulsory(self) -> float | None:
        """Bytes between memory and the L2 cache over those that have to be moved."""
        moved = None if self.counters is None else self.counters.dram_bytes
        due = self.planned.compulsory
        return None if moved is None or not due else moved / due

    def to_json(self) -> dict[str, Any]:
        """Everything about the job as a value that `json` can write."""
        rest: dict[str, Any] = {"time_over_floor": self.ratio, "timing": asdict(self.timing)}
        if self.counters is not None:
            rest["counters"] = asdict(self.counters) | {
                "dram_bytes": self.counters.dram_bytes,
                "dram_over_compulsory": self.dram_over_compulsory,
            }
        return self.planned.to_json() | rest


# The roofline: the least time in which a GPU could do a workload.


#: What an H100 reads from its memory in practice, bytes per second, and what its tensor cores do,
#: operations per second of 2-byte inputs (taken for 4-byte ones too). Others have these in the
#: ratio of their records to the H100's.
BYTES_PER_SECOND, FLOPS_PER_SECOND = 3.0e12, 790.0e12


@dataclass(frozen=True)
class Roofs:
    """Rates that a GPU reaches in practice, the two roofs of the roofline."""

    #: Reads from HBM.
    bytes_per_second: float = BYTES_PER_SECOND
    #: Of the tensor cores on 2-byte inputs; 1-byte inputs go twice as fast.
    flops_per_second: float = FLOPS_PER_SECOND


@dataclass(frozen=True)
class Floor:
    """What a workload costs at least, and the time of that."""

    #: Every input read once, the output written once.
    bytes: int
    #: Of the matrix products.
    flops: int
    roofs: Roofs = Roofs()
    #: Whether the products are of 1-byte inputs.
    eight_bits: bool = False

    @property
    def memory_microseconds(self) -> float:
        """Time to move the bytes."""
        return self.bytes / self.roofs.bytes_per_second * 1e6

    @property
    def compute_microseconds(self) -> float:
        """Time of the operations."""
        return self.flops / self.roofs.flops_per_second / (2 if self.eight_bits else 1) * 1e6

    @property
    def microseconds(self) -> float:
        """The longer of the two times."""
        return max(self.memory_microseconds, self.compute_microseconds)


@lru_cache(maxsize=8)
def roofs_of(target: Device) -> Roofs:
    """Rates of a device, scaled from those of the H100 by the ratio of their calibration records.

    Examples
    --------
    >>> from crossfuse.hardware import device
    >>> round(roofs_of(device("nvidia-h200")).bytes_per_second / 1e12, 2)
    4.38
    """
    h100 = DEVICES["nvidia-h100"]
    here, there = rates_of(target), rates_of(h100)
    memory = here.measured.hbm_read / there.measured.hbm_read
    compute = here.tensor_rate(128, 256, 2) * target.sms / there.tensor_rate(128, 256, 2) / h100.sms
    return Roofs(BYTES_PER_SECOND * memory, FLOPS_PER_SECOND * float(compute))


def floor(spec: WorkloadSpec, target: Device | None = None) -> Floor:
    """Work out the roofline of a workload; the intermediate never leaves the chip.

    The dense tensor cores of the H100 SXM5 are rated at 989.4 TFLOP/s on bfloat16 and 1978.9, twice
    as many, on 8-bit floats (NVIDIA, "H100 Tensor Core GPU Architecture", 2022). Of the former the
    chip reaches about 80 % in practice; the roof for 8-bit floats is twice that. Without a target
    it is the GPU of this machine, or an H100.

    Examples
    --------
    >>> from crossfuse.workload import lookup
    >>> round(floor(lookup("S3", M=16), device("nvidia-h100")).microseconds, 2)
    90.26
    """
    read = _bytes(spec.operands)
    written = prod(spec.output) * float_type(spec.out).size
    eight_bits = float_type(spec.dtype).size == 1
    return Floor(read + written, spec.flops, roofs_of(device(target)), eight_bits)


def weight_bytes(spec: WorkloadSpec) -> int:
    """Bytes that one computation reads of weights, the right-hand sides of the products."""
    return _bytes(spec.weight_operands)


def _bytes(operands: Iterable[Operand]) -> int:
    return sum(each.elements * float_type(each.dtype).size for each in operands)
