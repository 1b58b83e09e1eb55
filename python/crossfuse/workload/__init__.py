"""Workloads: specs, packaged suites, unscheduled functions, inputs, references and checks.

Names are loaded when first used, so that reading specs needs neither TVM nor torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOME = {
    "WorkloadSpec": "spec",
    "parse": "spec_text",
    "ids": "suites",
    "lookup": "suites",
    "resolve": "suites",
    "sweep": "suites",
    "prim_func": "build",
    "random_inputs": "inputs",
    "adversarial_inputs": "inputs",
    "reference": "numerics",
    "unfused": "numerics",
    "Accuracy": "accuracy",
    "Tolerance": "accuracy",
    "check": "accuracy",
    "tolerance": "accuracy",
    "ConvChainSpec": "conv_chain",
    "chain_module": "torch_modules",
    "conv_module": "torch_modules",
    "gated_ffn_module": "torch_modules",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
