"""Import of models: torch modules to Relax, Relax functions to workload functions.

Names are loaded when first used, so that importing the package needs neither TVM nor torch.
The function `crossfuse.relax.outline.outline` keeps its module's name free, hence is not listed.
"""

from __future__ import annotations

from crossfuse import lazy_names

_HOME = {
    "Argument": "outline",
    "BuildKernels": "build_kernels",
    "ChainOutcome": "outcome",
    "FuseCascades": "fuse_cascades",
    "FuseChains": "fuse_chains",
    "Imported": "torch_import",
    "KeepNans": "pipeline",
    "Outcome": "fuse_cascades",
    "Outlined": "outline",
    "import_torch": "torch_import",
}

__getattr__, __dir__, __all__ = lazy_names(__name__, _HOME)
