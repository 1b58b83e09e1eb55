"""The main job, end to end: a model or spec in, a checked and loadable kernel out.

Names are loaded when first used, so that importing the package needs neither TVM nor torch.
"""

from __future__ import annotations

from crossfuse import lazy_names

_HOME = {
    "Compiled": "compiled",
    "CompiledBins": "bins",
    "Source": "source",
    "Verdict": "checks",
    "check": "checks",
    "compile": "compiled",
    "compile_bins": "bins",
    "compile_model": "model",
    "CompiledModel": "model",
    "time_kernel": "measure",
    "read_source": "source",
}

__getattr__, __dir__, __all__ = lazy_names(__name__, _HOME)
