"""Plans from the text that they were written as."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from crossfuse.errors import PlanRefused, refuse
from crossfuse.planner.chain.spec import Chain, Dim, Product, Reduction, Tensor
from crossfuse.planner.kernels.resources import Resources
from crossfuse.planner.plan import VERSION, Plan, Runner


def read_plan(text: str) -> Plan:
    """See `Plan.from_json`."""
    try:
        document = json.loads(text)
        version = document.pop("version")
        if version != VERSION:
            raise _no_plan(f"version {version}")
        return _read(document)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _no_plan(f"{type(error).__name__}: {error}") from error


def _read(document: dict[str, Any]) -> Plan:
    given = document.pop("chain")
    chain = Chain(
        tuple(Dim(**each) for each in given["dims"]),
        tuple(Tensor(**_tuples(each)) for each in given["tensors"]),
        tuple(Product(**_tuples(each)) for each in given["products"]),
        tuple(Reduction(**_tuples(each)) for each in given["reductions"]),
    )
    kernels = tuple(Resources(**each) for each in document.pop("kernels"))
    runners = tuple(Runner(**each) for each in document.pop("runners"))
    return Plan(chain=chain, kernels=kernels, runners=runners, **document)


def _tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Lists as the tuples that they were."""
    return {name: tuple(each) if isinstance(each, list) else each for name, each in fields.items()}


def _no_plan(found: str) -> PlanRefused:
    error = refuse(
        PlanRefused,
        "plan-json",
        "text",
        found=found,
        limit=f"a plan of version {VERSION}, as Plan.to_json writes it",
        instead="plan the workload again",
    )
    assert isinstance(error, PlanRefused)
    return error
