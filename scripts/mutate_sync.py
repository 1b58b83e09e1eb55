"""How much of a wrong synchronisation the emulator names.

    python scripts/mutate_sync.py [--kernels gather split] [--every 10] [--json found.json]

Takes kernels of every family, right ones. Of each it makes mutants: fences, arrivals, waits,
commits, barriers and flags are left out, also by parts of a warp, weakened (order, scope, groups,
memory), moved past their neighbours, done twice, and given other phases, bytes, counts and
barriers. It runs the emulator on each and reports how many are named, by which kind of finding;
which are no fault, by the rule that says so; and which survive.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from crossfuse.files import write_json
from mutation.outcomes import Outcome, Tally, outcomes, tally
from mutation_kernels import KERNELS, OVER_RANKS

ALL = {**KERNELS, **OVER_RANKS}


def report(name: str, found: Tally, seconds: float) -> None:
    """Print what became of the mutants of a kernel."""
    named = sum(found.named.values())
    kinds = ", ".join(f"{kind} {count}" for kind, count in found.named.most_common())
    print(f"{name}: {named} named of {named + len(found.survivors)} ({seconds:.0f} s): {kinds}")
    for reason, count in found.equivalent.most_common():
        print(f"    {count} no fault: {reason}")
    for each in found.survivors:
        print(f"    survives: {each.mutant} ({', '.join(each.kinds) or 'nothing found'})")
    sys.stdout.flush()


def main() -> None:
    """Run it as the command line says."""
    parser = argparse.ArgumentParser(description="Faults of synchronisation, and who names them.")
    parser.add_argument("--kernels", nargs="+", choices=ALL, default=list(ALL))
    parser.add_argument("--every", type=int, default=1, help="one mutant of so many")
    parser.add_argument("--timeout", type=float, default=20.0, help="seconds of one run")
    parser.add_argument("--json", type=Path, help="where to write the counts")
    given = parser.parse_args()
    every: list[Outcome] = []
    for name in given.kernels:
        start = time.perf_counter()
        image, inputs = ALL[name]()
        found = outcomes(image, inputs, every=given.every, timeout_s=given.timeout)
        report(name, tally(found), time.perf_counter() - start)
        every += found
    total = tally(every)
    print(f"all: {100 * total.share:.1f} % named of those that are a fault")
    if given.json:
        write_json(given.json, summary(total))


def summary(total: Tally) -> dict[str, object]:
    """Counts, as values for a file."""
    return {
        "share": total.share,
        "named": dict(total.named),
        "no fault": dict(total.equivalent),
        "survivors": [str(each.mutant) for each in total.survivors],
    }


if __name__ == "__main__":
    main()
