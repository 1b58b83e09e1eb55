"""Modules with functions that are scheduled for a GPU, run on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tvm
from tvm import relax

from crossfuse import _tvm as ir
from crossfuse.emulate.llvm import serialise


def run_module(mod: Any, inputs: Sequence[np.ndarray]) -> np.ndarray:
    """The result of ``main``; functions that are bound to a GPU are made serial."""
    plain = mod.clone()
    for name, func in mod.functions_items():
        if isinstance(func, ir.PrimFunc) and "tirx.is_scheduled" in func.attrs:
            serial = serialise(func).with_attr("global_symbol", name.name_hint)
            plain.update_func(name, serial)
    built = tvm.compile(plain, target=tvm.target.Target({"kind": "llvm", "opt-level": 1}))
    machine = relax.VirtualMachine(built, tvm.cpu())
    return machine["main"](*map(tvm.runtime.tensor, inputs)).numpy()
