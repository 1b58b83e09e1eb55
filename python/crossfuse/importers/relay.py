"""Advice for models in Relay, TVM's graph IR before Relax, which users still look for."""

from __future__ import annotations

from crossfuse.errors import RefusedError, WorkloadRefused, refuse

#: Why there is no way to import it, and what there is.
GONE = (
    "Relay was removed from TVM; crossfuse takes Relax. Import the original model instead: "
    "crossfuse.compile_model takes torch modules, torch.export programs, ONNX models, "
    "tvm.relax.frontend.nn modules and Relax modules"
)
#: How a module of Relay begins as text: with its version, or with a function.
_BEGINNINGS = ("#[version", "def @")


def is_relay(model: object) -> bool:
    """Whether a model is Relay's: an object of an older TVM, or its text."""
    if isinstance(model, str):
        return model.lstrip().startswith(_BEGINNINGS)
    return any(each.__module__.startswith("tvm.relay") for each in type(model).__mro__)


def refused(where: str) -> RefusedError:
    """Build the refusal of a Relay model."""
    why, _, instead = GONE.partition(". ")
    return refuse(
        WorkloadRefused,
        "model-import",
        where,
        found="a module of Relay",
        limit=f"Relax; {why}",
        instead=instead[0].lower() + instead[1:],
    )
