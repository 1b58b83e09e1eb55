"""Counts the candidates of a chain, rule by rule and relaxation by relaxation, times a search.

    python scripts/search_space.py gemm_chain:M=256,K=4096,N=16384,L=4096

The search scores with bytes over bandwidths. These are round numbers of a Hopper part and no
measurements: what is timed is the search.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from typing import Any

from crossfuse.hardware import device
from crossfuse.planner.chain.build import chain_of
from crossfuse.planner.chain.spec import Chain
from crossfuse.workload import parse
from study.dataflow.movement import Machine
from study.dataflow.published import count
from study.dataflow.readings import readings, tied_tiles, without_clusters
from study.dataflow.relaxations import RELAXATIONS, groups_of, relaxation
from study.dataflow.search import Roof, idle_loops, least_bytes, search

ROOF = Roof({"hbm": 3.0e6, "l2": 5.5e6, "dsm": 3.0e6, "shared": 20.0e6})


def counts(chain: Chain, target: str) -> dict[str, Any]:
    """Published steps, other readings of them, and our own relaxations."""
    where = device(target)
    return {
        "steps": [(each.name, each.text, each.candidates) for each in count(chain, where)],
        "readings": [(each.rule, each.text, each.candidates) for each in readings(chain, where)],
        "tiles of clusters divide too": tied_tiles(chain),
        "no clusters": without_clusters(chain, where),
    }


def timed(
    chain: Chain, target: str, names: list[str], threads: int, bounded: bool
) -> dict[str, Any]:
    """Make the candidates of some relaxations, search them, and say what it took."""
    where, wall, process = device(target), time.perf_counter(), time.process_time()
    sizes, groups = {}, []
    for name in names:
        made = groups_of(chain, where, relaxation(name))
        sizes[name] = sum(each.size for each in made)
        groups += made
    bounds = (idle_loops(chain, groups), least_bytes(chain, ROOF)) if bounded else ()
    machine = Machine(where.l2_bytes)
    found = search(chain, groups, ROOF.score, machine, bounds=bounds, threads=threads)
    best = found.best[0]
    return {
        "candidates": sizes,
        "scored": found.scored,
        "left out": dict(found.bounded),
        "wall_s": time.perf_counter() - wall,
        "cpu_s": time.process_time() - process,
        # Of the whole process, in KiB on Linux.
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "best": [
            best.score,
            best.relaxation,
            str(best.schedule),
            best.tiling.block,
            best.tiling.cluster,
        ],
    }


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("spec", help="workload, such as gemm_chain:M=256,K=4096,N=16384,L=4096")
    parser.add_argument("--target", default="nvidia-h100")
    known = [each.name for each in RELAXATIONS]
    parser.add_argument("--relaxations", nargs="+", default=["published"], choices=known)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-bounds", action="store_true", help="analyse every candidate")
    parser.add_argument("--no-counts", action="store_true", help="search only")
    args = parser.parse_args()
    chain = chain_of(parse(args.spec))
    found = {} if args.no_counts else counts(chain, args.target)
    found["search"] = timed(chain, args.target, args.relaxations, args.threads, not args.no_bounds)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
