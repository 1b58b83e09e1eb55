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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 16)
HANG_S = 60.0


@dataclass(frozen=True)
class Case:
    """One kernel to validate."""

    spec: str
    cluster: int | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the case and of its library."""
        flags = "".join(
            f",{key}={value if isinstance(value, str) else int(value)}"
            for key, value in self.options.items()
        )
        return f"{self.spec}|cluster={self.cluster or 'auto'}{flags}"


def small_cases() -> list[Case]:
    """Every family and cluster size, as small as it gets: a sanitizer is 100 times slower."""
    found: list[Case] = []
    for cluster in SIZES:
        for flag in (True, False):
            for combine in ("sum", "max"):
                text = f"gemm:M=8,K={4 * cluster},N={2 * cluster},dtype=bfloat16,combine={combine}"
                found.append(Case(text, cluster, {"scatter": flag}))
            for family in ("gated_ffn", "gemm_chain"):
                text = f"{family}:M=3,K=8,N={4 * cluster},L={4 * cluster},dtype=bfloat16,act=silu"
                found.append(Case(text, cluster, {"ring": flag}))
    return found


def cases(quick: bool) -> list[Case]:
    """The matrix: every family, cluster size, combiner and dtype; then some larger shapes."""
    found: list[Case] = []
    dtypes = ("bfloat16",) if quick else ("float16", "bfloat16")
    for cluster in SIZES:
        for dtype in dtypes:
            wide = 840 if cluster in (3, 5, 6, 7) else 512  # 840 divides by all of them
            for flag in (True, False):
                found += [
                    Case(f"gemm:M=64,K=1024,N=128,dtype={dtype}", cluster, {"scatter": flag}),
                    Case(
                        f"gated_ffn:M=48,K=256,N={wide},L={wide},dtype={dtype},act=silu",
                        cluster,
                        {"ring": flag},
                    ),
                    Case(
                        f"gemm_chain:M=33,K=96,N={wide},L={wide},dtype={dtype},act=gelu_tanh",
                        cluster,
                        {"ring": flag},
                    ),
                ]
        for combine in ("prod", "max", "min"):
            for flag in (True, False):
                text = f"gemm:M=64,K=240,N=64,dtype=float32,combine={combine}"
                found.append(Case(text, cluster, {"scatter": flag}))
    larger = (
        ("G4", "G7", "S8") if quick else ("G2", "G3", "G4", "G6", "G7", "G9", "G10", "S2", "S8")
    )
    from crossfuse.workload.suites import lookup

    for name in larger:
        for rows in (16, 128):
            for cluster in (4, 8, 16):
                found.append(Case(str(lookup(name, M=rows)), cluster, {"ring": True}))
    return found


def pipeline_cases() -> list[Case]:
    """Kernels of the Hopper pipeline at shapes that a sanitizer gets through."""
    tensor: dict[str, Any] = {"rule": "tensor"}
    found = [
        Case(f"gemm:{text}", options=tensor)
        for text in (
            "M=128,N=256,K=256,dtype=bfloat16,weights=nk",
            "M=100,N=264,K=200,dtype=float16",
            "M=16,N=256,K=512,dtype=bfloat16,weights=nk",
            "M=1,N=128,K=512,dtype=bfloat16,weights=nk",
            "M=256,N=256,K=256,dtype=float8_e4m3fn,weights=nk,out=bfloat16",
        )
    ]
    clusters = {
        1: "gemm_chain:M=64,K=64,N=64,L=64,dtype=bfloat16,act=relu",
        2: "gated_ffn:M=100,K=64,N=256,L=64,dtype=bfloat16",
        4: "gemm_chain:M=100,K=72,N=512,L=64,dtype=float16",
        8: "gated_ffn:M=1,K=64,N=512,L=128,dtype=bfloat16",
        16: "gemm_chain:M=128,K=64,N=512,L=256,dtype=bfloat16",
    }
    dsm = tensor | {"placement": "dsm"}
    found += [Case(text, cluster, dsm) for cluster, text in clusters.items()]
    for text in (
        "gated_ffn:M=128,K=256,N=512,L=256,dtype=bfloat16",
        "gated_ffn:M=16,K=136,N=384,L=72,dtype=float16",
        "gated_ffn:M=1,K=256,N=512,L=256,dtype=bfloat16",
        "gemm_chain:M=64,K=256,N=512,L=256,dtype=float16,act=relu,weights=kn",
    ):
        for options in (
            {"placement": "registers"},
            {"placement": "dsm"},
            {"placement": "global"},
            {"placement": "l2"},
            {"placement": "l2", "constant_weights": True},
        ):
            found.append(Case(text, options=tensor | options))
    several_parts = "gated_ffn:M=16,K=136,N=384,L=72,dtype=float16"
    found.append(Case(several_parts, options=tensor | {"placement": "dsm-unordered"}))
    # Tiles of 256 rows need a wide layer.
    tall = "gated_ffn:M=200,K=64,N=4224,L=64,dtype=bfloat16"
    found.append(Case(tall, options=tensor | {"placement": "l2"}))
    return found


def build(case: Case, directory: str) -> dict[str, Any]:
    """Compile one case; a refusal is recorded as such."""
    import crossfuse
    from crossfuse.errors import RefusedError

    start = time.perf_counter()
    try:
        compiled = crossfuse.compile(
            case.spec, cluster=case.cluster, directory=directory, **case.options
        )
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


def run_case(spec_text: str, library: str, repeats: int, ordered: bool) -> dict[str, Any]:
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
    # Sums in no order are right, see above, and need not be equal.
    result["status"] = "passed" if distinct == 0 or not ordered else "failed"
    return result


def _on_device(inputs: Any, kernel: Any) -> tuple[list[Any], Any]:
    import torch

    from crossfuse.compiler.weights import to_torch

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
            result = run_case(job["spec"], job["library"], repeats, job["ordered"])
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
            "ordered": case.options.get("placement") != "dsm-unordered",
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
