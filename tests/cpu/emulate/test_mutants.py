"""Mutants of the synchronisation of every family of kernels: the emulator names what is a fault."""

from __future__ import annotations

import pytest

from crossfuse.errors import CheckFailed
from mutation.outcomes import outcomes, tally
from mutation_kernels import KERNELS, OVER_RANKS

pytestmark = pytest.mark.cpu

#: What of those that are a fault is named, of all families.
DUE = 0.99
#: One mutant of so many in every run, of kernels that have most kinds of statements between them.
SAMPLE = {"split": 17, "rows": 23}


@pytest.mark.parametrize("name", SAMPLE)
def test_a_sample_is_named(name: str) -> None:
    image, inputs = KERNELS[name]()
    found = tally(outcomes(image, inputs, every=SAMPLE[name], first=3, seeds=(0, 1)))
    assert sum(found.named.values()) >= 3
    assert not found.survivors, [str(each.mutant) for each in found.survivors]


@pytest.mark.parametrize("name", OVER_RANKS)
def test_mutants_of_kernels_over_ranks_are_named(name: str) -> None:
    found = tally(outcomes(*OVER_RANKS[name]()))
    assert sum(found.named.values()) >= 8
    assert not found.survivors, [str(each.mutant) for each in found.survivors]


def test_a_kernel_that_is_wrong_itself_is_refused() -> None:
    image, inputs = KERNELS["threads"]()
    from crossfuse.emulate.cuda import remove_cluster_barrier

    with pytest.raises(CheckFailed, match="in the kernel itself; limit: no finding"):
        outcomes(remove_cluster_barrier(image), inputs)


@pytest.mark.nightly
@pytest.mark.timeout(0)
def test_mutants_of_every_family_are_named() -> None:
    found = [each for make in KERNELS.values() for each in outcomes(*make())]
    total = tally(found)
    survivors = "\n".join(str(each.mutant) for each in total.survivors)
    assert total.share >= DUE, survivors
    assert sum(total.named.values()) > 1000
