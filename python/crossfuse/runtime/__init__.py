"""From generated CUDA to a loadable kernel library with a manifest, and back."""

from __future__ import annotations

from crossfuse.runtime.artefact import Artefact, KernelObject, build_library, build_object
from crossfuse.runtime.dispatch_table import DispatchTable
from crossfuse.runtime.kernel import LoadedKernel
from crossfuse.runtime.kernel_table import (
    Dispatch,
    Kernels,
    KernelTable,
    load_dispatch,
    load_kernels,
    write_dispatch,
    write_kernels,
)
from crossfuse.runtime.load import load
from crossfuse.runtime.manifest import Manifest, ResourceUsage
from crossfuse.runtime.model_artefact import load_model
from crossfuse.runtime.model_record import ModelArtefact, read_model_artefact
from crossfuse.runtime.nvcc import (
    Cubin,
    NvccInfo,
    cache_directory,
    compile_cubin,
    find_host_compiler,
    find_nvcc,
)
from crossfuse.runtime.peers import PeerGroup, PeerKernel

__all__ = [
    "Artefact",
    "Cubin",
    "Dispatch",
    "DispatchTable",
    "KernelObject",
    "KernelTable",
    "Kernels",
    "LoadedKernel",
    "Manifest",
    "ModelArtefact",
    "NvccInfo",
    "PeerGroup",
    "PeerKernel",
    "ResourceUsage",
    "build_library",
    "build_object",
    "cache_directory",
    "compile_cubin",
    "find_host_compiler",
    "find_nvcc",
    "load",
    "load_dispatch",
    "load_kernels",
    "load_model",
    "read_model_artefact",
    "write_dispatch",
    "write_kernels",
]
