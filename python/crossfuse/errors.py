"""Every refusal of the project is a value first and an exception second.

A refusal names the rule, the place, the value found, the limit, and what to do instead, so that
a command line, a tuner and a test read the same five facts.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Refusal:
    """Why something is not done.

    Attributes
    ----------
    rule : str
        Name of the rule that refuses, such as ``"dsm_reduce"`` or ``"cluster-extent"``.
    where : str
        The block, loop, buffer, file or option it is about.
    found : str
        The value that breaks the rule.
    limit : str
        What the rule allows.
    instead : str
        What the reader can do about it, as an imperative clause without a full stop.
    """

    rule: str
    where: str
    found: str
    limit: str
    instead: str

    def __str__(self) -> str:
        return (
            f"{self.rule}: {self.where}: found {self.found}; limit: {self.limit}. "
            f"Instead: {self.instead}."
        )


class RefusedError(RuntimeError):
    """Base of all refusals; ``refusal`` holds the five facts.

    Parameters
    ----------
    refusal : Refusal
        The facts; the message is their rendering.
    """

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal


class ScheduleRefused(RefusedError):
    """A schedule primitive was called on something it cannot transform."""


class LoweringRefused(RefusedError):
    """A scheduled function has no correct cluster kernel."""


class WorkloadRefused(RefusedError):
    """A workload spec, model or graph is not one the project can take."""


class PlanRefused(RefusedError):
    """A chain, loop order, tile, cluster or place that no plan can have."""


class CascadeRefused(RefusedError):
    """A chain of reductions cannot become one streaming loop."""


class EnvironmentRefused(RefusedError):
    """The machine lacks something: a package version, nvcc, a C++ compiler, a GPU."""


class ArtefactRefused(RefusedError):
    """A compiled artefact does not fit this device, version or argument list."""


class CheckFailed(RefusedError):
    """A checker found a wrong kernel; the message says which check and where."""


def refuse(
    error: type[RefusedError], rule: str, where: str, *, found: object, limit: str, instead: str
) -> RefusedError:
    """Build the exception to raise: ``raise refuse(ScheduleRefused, "dsm_reduce", ...)``.

    Parameters
    ----------
    error : type[RefusedError]
        Which family the refusal belongs to.
    rule, where, limit, instead : str
        See `Refusal`.
    found : object
        Rendered with ``str``.

    Returns
    -------
    RefusedError
        An instance of `error`.
    """
    return error(Refusal(rule, where, str(found), limit, instead))
