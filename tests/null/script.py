"""Programs of the repository as modules."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

SCRIPTS = Path(__file__).parents[2] / "scripts"


def load(name: str) -> ModuleType:
    """Import ``scripts/<name>.py``."""
    found = spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert found is not None and found.loader is not None
    module = module_from_spec(found)
    # Dataclasses look their module up.
    sys.modules[name] = module
    found.loader.exec_module(module)
    return module
