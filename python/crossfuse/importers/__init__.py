"""Importers of any framework's models as Relax modules with separate weights.

Names are loaded when first used, so that importing the package needs neither TVM nor torch.
"""

from __future__ import annotations

from crossfuse._lazy import lazy_names

_HOME = {"import_nn": "read", "import_onnx": "from_onnx", "read_model": "read"}

__getattr__, __dir__, __all__ = lazy_names(__name__, _HOME)
