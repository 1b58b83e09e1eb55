"""Compare the generated CUDA with what was recorded: for changes that must not change a kernel.

    python scripts/kernel_hashes.py              # all of them; exits with 1 where something differs
    python scripts/kernel_hashes.py --sample 2   # two kernels of each group
    python scripts/kernel_hashes.py --write      # record them anew

Kernels are scheduled and lowered, never built. A group is a family of kernels in one file of
measured candidates (``benchmarks/results``), the kernels that `crossfuse.compile` chooses for the
convolutions and the reductions of the suite (C1 ... and R1 ...), those of all families in
``mutation_kernels.py``, or what a tutorial lowers. Of a group of candidates that has more than
`SIZE` kernels, `SIZE` are taken: those with the least ids, which are hashes. The record has the
first digits of the SHA-256 of each kernel's CUDA, or the kind of refusal where there is no kernel.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

HOME = Path(__file__).resolve().parents[1]
RECORD = HOME / "tests" / "data" / "kernel-hashes.json"
#: Files of measured candidates, and the device whose planner they were measured for.
MEASURED = {
    "candidates-h100": "nvidia-h100",
    "candidates-h200": "nvidia-h200",
    "cascade-candidates-h100": "nvidia-h100",
    "pipeline-steps-h100": "nvidia-h100",
    "rows-candidates-h100": "nvidia-h100",
    "rows-candidates-h200": "nvidia-h200",
}
#: Kernels taken of a group of candidates.
SIZE = 64
_DIGITS = 16
#: Calls of tutorials that take long, and lower nothing that is not lowered without them.
_SLOW = ("emulate_cuda", "check", "explain", "draw", "check_schedule")

#: The tutorial whose kernels may come from the cache, and are then not lowered.
_MODELS = "09_models"

#: By group and kernel, the digest of its CUDA.
Digests = dict[str, dict[str, str]]


def digest(cuda: Any) -> str:
    """The first digits of the hash of a kernel's text."""
    from crossfuse.files import sha256

    return sha256(str(cuda).encode())[:_DIGITS]


@dataclass(frozen=True)
class Kernel:
    """One kernel, as a value that travels to another process.

    Attributes
    ----------
    make : Callable[..., str]
        Computes its digest.
    arguments : tuple
        Of `make`.
    text : str
        What it is.
    """

    make: Callable[..., str]
    arguments: tuple[Any, ...]
    text: str

    def digest(self) -> str:
        """The digest of its CUDA."""
        return self.make(*self.arguments)


def groups() -> dict[str, dict[str, Kernel]]:
    """All kernels that are recorded, by group and name."""
    from crossfuse.workload.suites import ids

    found: dict[str, dict[str, Kernel]] = {}
    for stem, target in MEASURED.items():
        for family, each in candidates(stem).items():
            found[f"{stem}, {family}"] = {
                name: Kernel(hash_candidate, (one, target), f"{one.spec} {one.summary}")
                for name, one in each.items()
            }
    chosen = [each for each in ids() if each[0] in "CR"]
    found["suite"] = {each: Kernel(hash_workload, (each,), each) for each in chosen}
    found["mutation kernels"] = {
        each: Kernel(hash_mutated, (each,), each) for each in mutation_kernels()
    }
    pages = sorted(each.stem for each in (HOME / "tutorials").glob("[0-9]*.py"))
    pages.remove(_MODELS)
    found["tutorials"] = {each: Kernel(hash_tutorial, (each,), each) for each in pages}
    return found


def candidates(stem: str) -> dict[str, dict[str, Any]]:
    """Candidates of a file by family, then by id; of large families a sample."""
    from crossfuse.meta_schedule.candidate import Candidate
    from crossfuse.planner.families import EAGER

    found: dict[str, dict[str, Candidate]] = {}
    for line in (HOME / "benchmarks" / "results" / f"{stem}.jsonl").read_text().splitlines():
        row = json.loads(line)
        given = row.get("candidate", row)
        family = given.get("family", "stream")
        if "spec" not in given or family == EAGER:
            continue  # says how the file was measured, or is no kernel of ours
        each = Candidate(given["spec"], family, given["tiles"])
        found.setdefault(family, {})[each.id] = each
    return {family: dict(sorted(each.items())[:SIZE]) for family, each in sorted(found.items())}


def mutation_kernels() -> Mapping[str, Callable[[], Any]]:
    """The kernels of ``mutation_kernels.py``."""
    folder = str(HOME / "scripts")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    kernels = import_module("mutation_kernels")
    found: Mapping[str, Callable[[], Any]] = {**kernels.KERNELS, **kernels.OVER_RANKS}
    return found


def hash_candidate(each: Any, target: str) -> str:
    """Schedule and lower a candidate."""
    from crossfuse.errors import RefusedError
    from crossfuse.hardware import device
    from crossfuse.lower.extract import lower
    from crossfuse.meta_schedule.candidate import schedule_candidate

    known = device(target)
    try:
        return digest(lower(schedule_candidate(each, known), known).image.cuda)
    except RefusedError as error:
        return type(error).__name__


def hash_workload(name: str) -> str:
    """Lower what `crossfuse.compile` chooses for a workload of the suite."""
    from crossfuse.compiler.compiled import choose
    from crossfuse.compiler.source import read_source
    from crossfuse.errors import RefusedError
    from crossfuse.hardware import device

    try:
        return digest(choose(read_source(name, None), device("nvidia-h100")).lowered.image.cuda)
    except RefusedError as error:
        return type(error).__name__


def hash_mutated(name: str) -> str:
    """Lower a small kernel of ``mutation_kernels.py``."""
    return digest(mutation_kernels()[name]()[0].cuda)


class _Skipped(Exception):
    """What a tutorial does with a kernel."""


def hash_tutorial(name: str) -> str:
    """Run a tutorial's statements, and hash all that they lower; what follows them is left out."""
    import crossfuse
    import crossfuse.runtime
    from crossfuse.lower.image import KernelImage

    def skipped(*_: Any, **__: Any) -> None:
        raise _Skipped

    made: list[str] = []
    initialise = KernelImage.__init__

    def recorded(self: Any, *values: Any, **fields: Any) -> None:
        initialise(self, *values, **fields)
        made.append(digest(self.cuda))

    path = HOME / "tutorials" / f"{name}.py"
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))  # of their `support`
    scope: dict[str, Any] = {"__name__": "__main__", "__file__": str(path)}
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        for each in _SLOW:
            if hasattr(crossfuse, each):
                stack.enter_context(patch.object(crossfuse, each, skipped))
        stack.enter_context(patch.object(crossfuse.runtime, "build_library", skipped))
        stack.enter_context(patch.object(KernelImage, "__init__", recorded))
        for statement in ast.parse(path.read_text(encoding="utf-8")).body:
            code = compile(ast.Module([statement], []), str(path), "exec")
            with contextlib.suppress(Exception):
                exec(code, scope)
    return digest("\n".join(sorted(set(made))))


def compute(wanted: Mapping[str, Mapping[str, Kernel]], jobs: int = 1) -> Digests:
    """Lower kernels, in as many processes as there are jobs."""
    every = [(group, name) for group, kernels in wanted.items() for name in kernels]
    kernels = [wanted[group][name] for group, name in every]
    if jobs == 1:
        made = [each.digest() for each in kernels]
    else:
        # A spawned process has no threads of this one's, which TVM may hold.
        with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
            made = list(pool.map(Kernel.digest, kernels, chunksize=8))
    found: Digests = {group: {} for group in wanted}
    for (group, name), each in zip(every, made, strict=True):
        found[group][name] = each
    return found


def sample(wanted: Mapping[str, Mapping[str, Kernel]], count: int) -> dict[str, dict[str, Kernel]]:
    """The first kernels of each group."""
    return {group: dict(list(each.items())[:count]) for group, each in wanted.items()}


def differences(
    wanted: Mapping[str, Mapping[str, Kernel]], recorded: Digests, found: Digests
) -> Iterator[str]:
    """What differs, a line for each kernel."""
    for group, digests in found.items():
        known = recorded.get(group, {})
        for name, each in digests.items():
            text = f"{group}: {wanted[group][name].text}"
            if name not in known:
                yield f"added    {text}"
            elif known[name] != each:
                yield f"changed  {text}: {known[name]} -> {each}"


def removed(wanted: Mapping[str, Mapping[str, Kernel]], recorded: Digests) -> Iterator[str]:
    """What is recorded of kernels that are no more."""
    for group, digests in recorded.items():
        for name in digests.keys() - wanted.get(group, {}).keys():
            yield f"removed  {group}: {name}"


def read() -> Digests:
    """What was recorded."""
    found: Digests = json.loads(RECORD.read_text(encoding="utf-8"))["digests"]
    return found


def main() -> int:
    """Compare, or record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="record what is found")
    parser.add_argument("--sample", type=int, help="kernels of each group; all of them if left out")
    parser.add_argument("--group", action="append", help="these alone, by their beginnings")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    given = parser.parse_args()
    every = groups()
    wanted = every if given.sample is None else sample(every, given.sample)
    if given.group:
        start = tuple(given.group)
        wanted = {name: each for name, each in wanted.items() if name.startswith(start)}
    found = compute(wanted, given.jobs)
    if given.write:
        if wanted is not every:
            parser.error("what is recorded is all of it: leave --sample and --group out")
        about = "First digits of the SHA-256 of generated CUDA, see scripts/kernel_hashes.py"
        document = {"about": f"{about}; {SIZE} kernels of each family at most.", "digests": found}
        RECORD.parent.mkdir(exist_ok=True)
        RECORD.write_text(json.dumps(document, indent=0) + "\n", encoding="utf-8")
        return 0
    recorded = read()
    lines = [*differences(wanted, recorded, found)]
    if wanted is every:
        lines += removed(wanted, recorded)
    print("\n".join([*lines, f"{sum(map(len, found.values()))} kernels, {len(lines)} differ"]))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
