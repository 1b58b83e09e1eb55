"""The packaged suites."""

from __future__ import annotations

import pytest

from crossfuse.errors import WorkloadRefused
from crossfuse.workload import ids, lookup, parse, resolve, sweep
from crossfuse.workload.suites import entry


def test_every_suite_is_complete() -> None:
    assert ids("gemm_chain") == tuple(f"G{i}" for i in range(1, 11))
    assert ids("gated_ffn") == tuple(f"S{i}" for i in range(1, 9))
    assert ids("conv_chain") == tuple(f"C{i}" for i in range(1, 9))
    assert ids("cascade") == tuple(f"R{i}" for i in range(1, 15))
    assert len(ids()) == 40
    assert sweep()[0] == 1 and sweep()[-1] == 4096


def test_a_gated_ffn_is_that_of_the_model() -> None:
    spec = lookup("S3")
    assert str(spec) == "gated_ffn:M=128,K=4096,N=11008,L=4096,dtype=bfloat16,act=silu"
    assert entry("S3").title == "Llama-2-7B"


def test_rows_and_type_can_be_chosen() -> None:
    assert lookup("G4", M=1, dtype="float16") == parse(
        "gemm_chain:M=1,K=768,N=3072,L=768,dtype=float16"
    )


@pytest.mark.parametrize("name", [*ids("gemm_chain"), *ids("gated_ffn")])
def test_every_chain_has_a_spec_at_every_row_count(name: str) -> None:
    for rows in sweep():
        spec = lookup(name, M=rows)
        assert (spec.M, parse(str(spec))) == (rows, spec)


@pytest.mark.parametrize("name", ids("cascade"))
def test_other_entries_are_known_but_refused(name: str) -> None:
    assert not entry(name).is_chain
    with pytest.raises(WorkloadRefused, match=f"workload-kind: {name}: found {entry(name).kind}"):
        lookup(name)


def test_resolve_takes_ids_changes_and_specs() -> None:
    assert resolve("S3") == lookup("S3")
    assert resolve("S3:M=16,dtype=float16,act=gelu").act == "gelu"
    assert resolve("gemm:M=1,K=2,N=3") == parse("gemm:M=1,K=2,N=3")
