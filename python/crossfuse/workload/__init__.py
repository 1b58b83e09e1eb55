"""Workloads: specs, packaged suites, unscheduled functions, inputs, references and checks.

Names are loaded when first used, so that reading specs needs neither TVM nor torch.
"""

from __future__ import annotations

from crossfuse import lazy_names

_HOME = {
    "WorkloadSpec": "spec",
    "parse": "suites",
    "ids": "suites",
    "lookup": "suites",
    "resolve": "suites",
    "sweep": "suites",
    "prim_func": "build",
    "all_gather": "ranks",
    "all_reduce": "ranks",
    "all_to_all": "ranks",
    "reduce_scatter": "ranks",
    "row_parallel": "ranks",
    "random_inputs": "numerics",
    "adversarial_inputs": "numerics",
    "reference": "numerics",
    "unfused": "numerics",
    "Accuracy": "tolerances",
    "Tolerance": "tolerances",
    "check": "tolerances",
    "tolerance": "tolerances",
    "ConvChainSpec": "conv_chain",
    "LayersSpec": "spec",
    "parse_layers": "suites",
    "chain_module": "torch_modules",
    "conv_module": "torch_modules",
    "gated_ffn_module": "torch_modules",
}

__getattr__, __dir__, __all__ = lazy_names(__name__, _HOME)
