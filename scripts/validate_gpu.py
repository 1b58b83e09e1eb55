"""Runs every kernel family on a GPU and records what came out.

    python scripts/validate_gpu.py --out benchmarks/results/validation.json

Libraries are built in parallel (no GPU needed); then one process runs them one after another, and
is replaced if a kernel hangs or kills it. Each case: 100 runs that must agree bit by bit, the
numeric rule on random and adversarial inputs, and the median time of a CUDA graph replay with the
L2 cache flushed.
"""

from __future__ import annotations

import argparse
import json
import queue
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from validation_cases import Case, cases, pipeline_cases, small_cases

HANG_S = 60.0


def build(case: Case, directory: str) -> dict[str, Any]:
    """Compile one case; a refusal is recorded as such."""
    from crossfuse.errors import RefusedError

    start = time.perf_counter()
    try:
        compiled = case.compile(directory)
    except RefusedError as error:
        return {"case": case.name, "status": "refused", "detail": str(error)}
    except Exception as error:  # one broken case must not hide the others
        return {"case": case.name, "status": "failed", "detail": f"{error}"[-600:]}
    used = compiled.artefact.manifest.resources
    return {
        "case": case.name,
        "status": "built",
        "library": str(compiled.artefact.shared_object),
        "registers": max(each.registers for each in used),
        "spill_bytes": sum(each.spill_store_bytes + each.spill_load_bytes for each in used),
        "shared_bytes": max(each.dynamic_shared_bytes for each in compiled.lowered.image.launches),
        "compile_seconds": round(time.perf_counter() - start, 2),
    }


def run_case(spec_text: str, library: str, repeats: int) -> dict[str, Any]:
    """Run one library on the GPU: repeats, numerics, time."""
    from crossfuse import workload
    from crossfuse.runtime import load

    spec = workload.parse(spec_text)
    kernel = load(library)
    errors = {}
    sets = {"random": workload.random_inputs(spec, 0)} | dict(workload.adversarial_inputs(spec))
    for name, inputs in sets.items():
        errors[name] = workload.check(spec, inputs, kernel.run(*inputs.values())).worst
    tensors, output = _on_device(sets["random"], kernel)
    kernel(*tensors, output)
    first = output.clone()
    distinct = 0
    for _ in range(repeats):
        output.fill_(float("nan"))
        kernel(*tensors, output)
        distinct += int(not _equal(output, first))
    result = {"worst_error_over_allowed": {k: round(v, 4) for k, v in errors.items()}}
    result |= {"repeats": repeats, "differing": distinct, "active_clusters": None}
    result["active_clusters"] = kernel.max_active_clusters()
    if repeats > 1:  # not under a sanitizer
        from crossfuse.compiler.measure import median_microseconds

        result["microseconds"] = round(median_microseconds(lambda: kernel(*tensors, output)), 2)
    result["status"] = "passed" if distinct == 0 else "failed"
    return result


def _on_device(inputs: Any, kernel: Any) -> tuple[list[Any], Any]:
    import torch

    from crossfuse.runtime.tensors import to_torch

    tensors = [to_torch(array).cuda() for array in inputs.values()]
    (spec,) = (each for each in kernel.buffers if each.output)
    return tensors, torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="cuda")


def _equal(left: Any, right: Any) -> bool:
    import torch

    bits = torch.int16 if left.element_size() == 2 else torch.int32
    return bool(torch.equal(left.view(bits), right.view(bits)))


def worker(jobs: str, repeats: int) -> None:
    """Run the cases of a job file one after another; one JSON line each."""
    for job in json.loads(Path(jobs).read_text()):
        print(json.dumps({"case": job["case"], "status": "started"}), flush=True)
        try:
            result = run_case(job["spec"], job["library"], repeats)
        except Exception as error:
            result = {"status": "failed", "detail": f"{type(error).__name__}: {error}"[:600]}
        print(json.dumps({"case": job["case"]} | result), flush=True)


def run_all(jobs: list[dict[str, Any]], repeats: int, prefix: list[str]) -> dict[str, Any]:
    """Run jobs in a process of their own, replaced after a hang or a crash."""
    results: dict[str, Any] = {}
    while True:
        left = [job for job in jobs if job["case"] not in results]
        if not left:
            return results
        current = _run_some(left, results, repeats, prefix)
        if current is not None:
            results[current] = {"case": current, "status": "failed", "detail": "hang or crash"}
        elif all(job["case"] not in results for job in left):
            raise RuntimeError("the GPU worker does not start")


def _run_some(
    jobs: list[dict[str, Any]], results: dict[str, Any], repeats: int, prefix: list[str]
) -> str | None:
    """One worker process; the case it died in, or None."""
    with tempfile.NamedTemporaryFile("w", suffix=".json", delete=False) as file:
        json.dump(jobs, file)
    command = [*prefix, sys.executable, __file__, "--worker", file.name, "--repeats", str(repeats)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    lines: queue.Queue[str | None] = queue.Queue()
    assert process.stdout is not None
    threading.Thread(target=_pump, args=(process.stdout, lines), daemon=True).start()
    current: str | None = None
    while True:
        try:
            line = lines.get(timeout=HANG_S * (10 if prefix else 1))
        except queue.Empty:
            process.kill()
            return current
        if line is None:
            return current if process.wait() else None
        if not line.startswith("{"):
            print(line.rstrip())
            continue
        record = json.loads(line)
        current = record["case"] if record["status"] == "started" else None
        if current is None:
            results[record["case"]] = record


def _pump(stream: Any, lines: queue.Queue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def main() -> None:
    """Build, run, write."""
    from crossfuse.bench.environment import record

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("validation.json"))
    parser.add_argument("--jobs", type=int, default=8, help="parallel builds")
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--quick", action="store_true", help="a smaller matrix")
    parser.add_argument("--small", action="store_true", help="small shapes, for a sanitizer")
    parser.add_argument("--pipeline", action="store_true", help="the Hopper pipeline, small shapes")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--commit", default="", help="recorded where there is no git")
    parser.add_argument("--sanitizer", default="", help="a compute-sanitizer tool to run under")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker, options.repeats)
        return
    matrix = small_cases() if options.small else cases(options.quick)
    if options.pipeline:
        matrix = pipeline_cases()
    chosen = [case for case in matrix if options.only in case.name]
    scratch = tempfile.mkdtemp()
    with ProcessPoolExecutor(options.jobs) as pool:
        folders = [f"{scratch}/{index}" for index in range(len(chosen))]
        built = list(pool.map(build, chosen, folders))
    jobs = [
        {
            "case": case.name,
            "spec": case.spec,
            "library": record["library"],
        }
        for case, record in zip(chosen, built, strict=True)
        if record["status"] == "built"
    ]
    tool = ["compute-sanitizer", "--tool", options.sanitizer, "--error-exitcode", "1"]
    results = run_all(jobs, options.repeats, tool if options.sanitizer else [])
    rows = [record | results.get(record["case"], {}) for record in built]
    for row in rows:
        row.pop("library", None)
    document = {"environment": record() | ({"commit": options.commit} if options.commit else {})}
    document |= {"sanitizer": options.sanitizer or None, "cases": rows}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(document, indent=1) + "\n")
    for status in ("passed", "refused", "failed"):
        count = sum(row["status"] == status for row in rows)
        print(f"{count} {status}")
    for row in rows:
        if row["status"] == "failed":
            print(row["case"], row.get("detail", f"{row.get('differing')} runs differ"))


if __name__ == "__main__":
    main()
