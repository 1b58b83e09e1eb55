"""Functions of plain blocks on LLVM, many in one compilation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import tvm


class Compiled:
    """Functions by name."""

    def __init__(self, functions: Mapping[str, Any]) -> None:
        self._functions = dict(functions)
        # Letters and digits alone make names of symbols.
        self._symbols = {name: f"function{at}" for at, name in enumerate(functions)}
        module = tvm.IRModule(
            {
                self._symbols[name]: each.with_attr("global_symbol", self._symbols[name])
                for name, each in functions.items()
            }
        )
        target = tvm.target.Target({"kind": "llvm", "opt-level": 0})
        self._executable = tvm.compile(module, target)

    def __call__(self, name: str, arrays: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Run a function; what it stores by name. Parameters without an array are stored."""
        arguments = {}
        for each in self._functions[name].params:
            shape, dtype = [int(extent) for extent in each.ty.shape], str(each.ty.dtype)
            given = arrays.get(str(each.name))
            array = np.full(shape, np.nan, dtype) if given is None else given.detach().numpy()
            arguments[str(each.name)] = tvm.runtime.tensor(np.asarray(array, order="C"))
        self._executable[self._symbols[name]](*arguments.values())
        return {
            key: torch.from_numpy(each.numpy())
            for key, each in arguments.items()
            if key not in arrays
        }
