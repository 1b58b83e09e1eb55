"""The kernels that `validate_gpu.py` runs: every family, cluster size, combiner and dtype."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import crossfuse
from crossfuse import Compiled
from crossfuse.schedule.rules.threads import schedule_ffn, schedule_split_k
from crossfuse.workload import parse, prim_func
from crossfuse.workload.suites import lookup

SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 16)
#: Rules of ordinary instructions by the option that they alone have.
RULES: dict[str, Any] = {"ring": schedule_ffn, "scatter": schedule_split_k}


@dataclass(frozen=True)
class Case:
    """One kernel to validate: by `crossfuse.compile`, or by a rule of ordinary instructions."""

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

    def compile(self, directory: str) -> Compiled:
        """The kernel: of a rule with options of its own, or what `crossfuse.compile` chooses."""
        rule = next((RULES[each] for each in self.options if each in RULES), None)
        if rule is None:
            return crossfuse.compile(
                self.spec, cluster=self.cluster, directory=directory, **self.options
            )
        func = prim_func(parse(self.spec))
        return crossfuse.compile(
            rule(func, cluster=self.cluster, **self.options), directory=directory
        )


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
            {"placement": "l2", "constant_weights": False},
            {"placement": "l2", "constant_weights": True},
        ):
            found.append(Case(text, options=tensor | options))
    # Tiles of 256 rows need a wide layer.
    tall = "gated_ffn:M=200,K=64,N=4224,L=64,dtype=bfloat16"
    found.append(Case(tall, options=tensor | {"placement": "l2"}))
    return found
