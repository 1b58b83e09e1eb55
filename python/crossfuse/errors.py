"""Every refusal of the project is a value first and an exception second.

A refusal names the rule, the place, the value found, the limit, and what to do instead, so that
a command line, a tuner and a test read the same five facts.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

#: Characters of a fault that a refusal repeats.
_LONGEST_FAULT = 300
#: Characters of a place and of another fact, which may repeat anything that somebody passed; output
#: of compilers is longer than what people write.
_PLACE, _FACT = 300, 1200


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

    Examples
    --------
    >>> print(Refusal("cluster", "loop 'c'", "32 CTAs", "at most 16", "split the loop"))
    cluster: loop 'c': found 32 CTAs; limit: at most 16. Instead: split the loop.
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

    Examples
    --------
    >>> from crossfuse.workload import parse
    >>> try:
    ...     parse("gemm:M=16,K=64")
    ... except RefusedError as error:
    ...     print(error.refusal.rule, "|", error.refusal.instead)
    workload-extent | add N=128 or the extents you mean
    """

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal


_Refused = TypeVar("_Refused", bound=RefusedError)


class ScheduleRefused(RefusedError):
    """A schedule primitive was called on something it cannot transform.

    Examples
    --------
    >>> import tvm
    >>> from crossfuse.workload import parse, prim_func
    >>> sch = tvm.s_tir.Schedule(prim_func(parse("gemm:M=32,K=64,N=32")))
    >>> try:
    ...     sch.cluster_bind(sch.get_loops(sch.get_sblock("gemm0"))[0])
    ... except ScheduleRefused as error:
    ...     print(error.refusal.found, "|", error.refusal.limit)
    extent 32 | 1 to 16 CTAs in a cluster
    """


class LoweringRefused(RefusedError):
    """A scheduled function has no correct cluster kernel.

    Examples
    --------
    >>> from crossfuse.lower.extract import lower
    >>> from crossfuse.workload import parse, prim_func
    >>> try:
    ...     lower(prim_func(parse("gemm:M=32,K=64,N=32")))
    ... except LoweringRefused as error:
    ...     print(error.refusal.found)
    no loop bound to CTAs or threads
    """


class WorkloadRefused(RefusedError):
    """A workload spec, model or graph is not one the project can take.

    Examples
    --------
    >>> from crossfuse.workload import lookup
    >>> try:
    ...     lookup("S99")
    ... except WorkloadRefused as error:
    ...     print(error.refusal.limit)
    G1 to G10, S1 to S8, C1 to C8, R1 to R14
    """


class ArgumentRefused(RefusedError):
    """An argument of a public call is of another type than it takes, or out of range.

    Examples
    --------
    >>> import crossfuse
    >>> try:
    ...     crossfuse.device(90)
    ... except ArgumentRefused as error:
    ...     print(error.refusal.where, "|", error.refusal.found)
    name of device | 90
    """


class PlanRefused(RefusedError):
    """A chain, loop order, tile, cluster or place that no plan can have.

    Examples
    --------
    >>> import crossfuse
    >>> try:
    ...     crossfuse.plan("G1", only=("fast",))
    ... except PlanRefused as error:
    ...     print(error.refusal.instead)
    name some of these families
    """


class CascadeRefused(RefusedError):
    """A chain of reductions cannot become one streaming loop.

    Examples
    --------
    >>> from crossfuse.cascade.detect import detect
    >>> from tvm import te
    >>> x = te.placeholder((4, 8), "float32", name="X")
    >>> try:
    ...     detect(te.create_prim_func([x, te.compute((4, 8), lambda i, j: x[i, j] * 2, name="Y")]))
    ... except CascadeRefused as error:
    ...     print(error.refusal.found, "|", error.refusal.instead)
    no reduction | leave it to an element-wise kernel
    """


class GradientRefused(RefusedError):
    """A function has no gradient that gathers, or none is written for what it computes.

    Examples
    --------
    >>> from crossfuse.autodiff import gradients
    >>> from tvm import te
    >>> x, at = te.placeholder((8,), "float32", "X"), te.placeholder((4,), "int32", "At")
    >>> y = te.compute((4,), lambda i: x[at[i]], name="Y")
    >>> try:
    ...     gradients(te.create_prim_func([x, at, y]))
    ... except GradientRefused as error:
    ...     print(error.refusal.found)
    X[At[i0]], where At[i0] is data
    """


class EnvironmentRefused(RefusedError):
    """The machine lacks something: a package version, nvcc, a C++ compiler, a GPU.

    Examples
    --------
    >>> from crossfuse.runtime import find_nvcc
    >>> try:
    ...     release = find_nvcc().release
    ... except EnvironmentRefused as error:
    ...     print(error.refusal.instead)
    """


class ArtefactRefused(RefusedError):
    """A compiled artefact does not fit this device, version or argument list.

    Examples
    --------
    >>> import crossfuse
    >>> try:
    ...     crossfuse.load("no/such/main.so")
    ... except ArtefactRefused as error:
    ...     print(error.refusal.rule)
    artefact-file
    """


class CheckFailed(RefusedError):
    """A checker found a wrong kernel; the message says which check and where.

    Examples
    --------
    >>> import numpy as np
    >>> from crossfuse.workload import check, parse, random_inputs
    >>> spec = parse("gemm:M=16,K=64,N=16")
    >>> try:
    ...     check(spec, random_inputs(spec), np.zeros((16, 8), np.float32))
    ... except CheckFailed as error:
    ...     print(error.refusal.rule)
    output-type
    """


class FaultWarning(RuntimeWarning):
    """A fault inside Crossfuse left one group of a model to separate kernels."""


@contextmanager
def contained(error: type[RefusedError], rule: str, where: str) -> Iterator[None]:
    """Turn any fault of ours into a refusal, so that it costs one group and not the whole model.

    A refusal passes as it is. Anything else raised inside becomes a refusal of the family `error`,
    and is announced by a `FaultWarning`.

    Examples
    --------
    >>> import warnings
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("ignore")
    ...     try:
    ...         with contained(PlanRefused, "plan", "group 'ffn'"):
    ...             {}["tile"]
    ...     except PlanRefused as refusal:
    ...         print(refusal.refusal.found)
    a fault of Crossfuse, KeyError: 'tile'
    """
    try:
        yield
    except RefusedError:
        raise
    except Exception as fault:
        found = f"a fault of Crossfuse, {type(fault).__name__}: {str(fault)[:_LONGEST_FAULT]}"
        warnings.warn(f"{where}: {found}", FaultWarning, stacklevel=3)
        limit, instead = "no fault", "nothing need be done, separate kernels run; please report it"
        raise refuse(error, rule, where, found=found, limit=limit, instead=instead) from fault


#: The family and the facts of this thread's last refusal, as ``made``: TVM rebuilds exceptions that
#: pass through it, see `crossfuse.lower.refusal.refusals`. The exception itself would keep all that
#: its traceback holds.
LAST = threading.local()


def refuse(
    error: type[_Refused], rule: str, where: str, *, found: object, limit: str, instead: str
) -> _Refused:
    """Build the exception to raise: ``raise refuse(ScheduleRefused, "dsm_reduce", ...)``.

    Parameters
    ----------
    error : type[RefusedError]
        Which family the refusal belongs to.
    rule, where, limit, instead : str
        See `Refusal`.
    found : object
        Rendered with ``str``; like all other texts it is cut where it is long.

    Returns
    -------
    RefusedError
        An instance of `error`.

    Examples
    --------
    >>> where, limit = "max_cluster", "1 to 16 CTAs"
    >>> print(refuse(PlanRefused, "budget", where, found=32, limit=limit, instead="ask for less"))
    budget: max_cluster: found 32; limit: 1 to 16 CTAs. Instead: ask for less.
    """
    facts = Refusal(rule, _cut(where, _PLACE), _cut(str(found)), _cut(limit), _cut(instead))
    LAST.made = error, facts
    return error(facts)


@dataclass(frozen=True)
class Rule(Generic[_Refused]):
    """A rule that is broken at several places: called with what is found at one, it is refused.

    Examples
    --------
    >>> refused = Rule(PlanRefused, "budget", instead="ask for less")
    >>> print(refused("max_cluster", 32, "1 to 16 CTAs"))
    budget: max_cluster: found 32; limit: 1 to 16 CTAs. Instead: ask for less.
    """

    #: The family of its refusals.
    error: type[_Refused]
    name: str
    #: What to do in its stead, where a place says nothing else.
    instead: str = ""

    def __call__(self, where: str, found: object, limit: str, instead: str = "") -> _Refused:
        """Build the exception to raise, see `refuse`."""
        instead = instead or self.instead
        return refuse(self.error, self.name, where, found=found, limit=limit, instead=instead)


def _cut(text: str, most: int = _FACT) -> str:
    """A text as it can be shown: of bearable length, and without what moves a cursor."""
    if len(text) > most:
        half = most // 2
        text = f"{text[:half]} ... ({len(text)} characters) ... {text[-half:]}"
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() or each in "\n\t" else repr(each)[1:-1] for each in text
    )
