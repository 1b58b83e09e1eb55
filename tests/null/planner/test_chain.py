"""Chains as values: from workloads, of any length, and what is none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from crossfuse.errors import PlanRefused
from crossfuse.planner.chain.build import Further, Operand, assemble, chain_of, matrix_chain
from crossfuse.planner.chain.spec import Chain, Dim, Product, Reduction, Tensor
from crossfuse.workload import ids, lookup, parse
from crossfuse.workload.expression import CYCLES

FFN = matrix_chain(128, [768, 3072, 768])


def shapes(chain: Chain) -> dict[str, str]:
    return {each.name: "".join(each.dims) for each in chain.tensors}


def test_a_gated_ffn_has_two_weights_that_multiply_the_same_rows() -> None:
    chain = chain_of(parse("gated_ffn:M=16,K=64,N=96,L=32,dtype=float8_e4m3fn,out=bfloat16"))
    assert chain.extents == {"m": 16, "k": 64, "n": 96, "l": 32}
    assert shapes(chain) == {
        "A": "mk",
        "B_gate": "nk",
        "B_up": "nk",
        "C": "mn",
        "D": "ln",
        "E": "ml",
    }
    assert chain.products == (
        Product("C", "A", ("B_gate", "B_up"), "k", functions=CYCLES["sigmoid"]),
        Product("E", "C", ("D",), "n"),
    )
    assert [each.item for each in chain.tensors] == [1, 1, 1, 1, 1, 2]


def test_a_convolution_is_the_product_of_its_windows() -> None:
    chain = chain_of(parse("conv_chain:batch=2,H=7,W=7,IC=64,OC1=32,OC2=128,k1=3"))
    assert chain.extents == {"m": 98, "k": 576, "n": 32, "l": 128}
    assert chain.tensor("A").repeats == 9
    assert chain.elements("A") // 9 == 98 * 64


def test_one_product_is_a_chain() -> None:
    chain = chain_of(parse("gemm:M=16,K=64,N=96"))
    assert shapes(chain) == {"A": "mk", "B": "nk", "C": "mn"}
    assert chain.output.role == "output" and not chain.intermediates


@pytest.mark.parametrize("name", [each for each in ids() if each[0] in "GSC"])
def test_workloads_have_chains_of_the_same_work(name: str) -> None:
    spec = lookup(name)
    chain = chain_of(spec)
    assert chain.flops == spec.flops
    assert chain.output.dims == ("m", "l")
    # Weights are those of the workload; of a convolution so is the image.
    stored = {each.name: each for each in spec.weight_operands}
    sizes = {name: each.shape[0] * each.shape[1] for name, each in stored.items()}
    assert {each: chain.elements(each) for each in sizes} == sizes


def test_longer_chains_are_batched_and_gated() -> None:
    chain = matrix_chain(8, [4, 5, 6, 7], batch=3, batched_weights=True, gated=True)
    assert chain.extents == {"b": 3, "m": 8, "k": 4, "n0": 5, "n1": 6, "n2": 7}
    assert shapes(chain) == {
        "A": "bmk",
        "B0_gate": "bn0k",
        "B0_up": "bn0k",
        "C0": "bmn0",
        "B1": "bn1n0",
        "C1": "bmn1",
        "B2": "bn2n1",
        "C2": "bmn2",
    }
    assert chain.rows == ("b", "m")
    assert [chain.column(each) for each in range(3)] == ["n0", "n1", "n2"]
    assert [set(chain.loops(each)) for each in range(3)] == [
        {"b", "m", "n0", "k"},
        {"b", "m", "n1", "n0"},
        {"b", "m", "n2", "n1"},
    ]
    assert shapes(matrix_chain(8, [4, 5, 6], batch=3))["D"] == "ln"


def changed(**tensors: Tensor) -> Chain:
    """The chain with other tensors."""
    return replace(FFN, tensors=tuple(tensors.get(each.name, each) for each in FFN.tensors))


def with_product(index: int, **fields: object) -> Chain:
    products = list(FFN.products)
    products[index] = replace(products[index], **fields)
    return replace(FFN, products=tuple(products))


C, D, E = (FFN.tensor(each) for each in "CDE")
BAD = {
    "no product": (
        lambda: replace(FFN, products=()),
        "chain: products: found none; limit: at least one product",
    ),
    "a dim twice": (lambda: replace(FFN, dims=(*FFN.dims, Dim("m", 3))), "dims: found 'm' twice"),
    "a dim of a reserved name": (
        lambda: replace(FFN, dims=(*FFN.dims, Dim("terms", 2))),
        "dims: found 'terms'; limit: other names",
    ),
    "a tensor twice": (
        lambda: replace(FFN, tensors=(*FFN.tensors, E)),
        "tensors: found 'E' twice",
    ),
    "an unknown dim": (
        lambda: changed(C=replace(C, dims=("m", "x"))),
        "tensor C: found 'x'; limit: the dims m, k, n, l",
    ),
    "a diagonal": (
        lambda: changed(C=replace(C, dims=("m", "m"))),
        "tensor C: found 'm' twice; limit: each dim once",
    ),
    "an unknown tensor": (
        lambda: with_product(1, rights=("X",)),
        "product of E: found 'X'; limit: the tensors A, B, C, D, E",
    ),
    "no iterations": (
        lambda: replace(FFN, dims=(Dim("m", 0), *FFN.dims[1:])),
        "dim m: found 0; limit: a positive integer",
    ),
    "no bytes": (lambda: changed(C=replace(C, item=0)), "item of C: found 0"),
    "half a byte": (lambda: changed(C=replace(C, item=0.5)), "item of C: found 0.5"),
    "a dim that indexes nothing": (
        lambda: replace(FFN, dims=(*FFN.dims, Dim("x", 3))),
        "dim x: found no tensor with it; limit: dims that index a tensor",
    ),
    "no chain": (
        lambda: with_product(1, left="A"),
        "product of E: found left operand A; limit: C, which the product before makes",
    ),
    "no weights": (lambda: with_product(1, rights=()), "product of E: found 0 right operands"),
    "three weights": (
        lambda: with_product(0, rights=("B", "B", "B")),
        "product of C: found 3 right operands",
    ),
    "a wrong role": (
        lambda: changed(C=replace(C, role="input")),
        "product of C: found C as input; limit: intermediate, from its place in the chain",
    ),
    "a sum over a dim that an operand lacks": (
        lambda: with_product(1, reduction="l"),
        "found a sum over 'l', which does not index C; limit: a dim that indexes both operands: n",
    ),
    "a sum over a dim of the output": (
        lambda: changed(E=replace(E, dims=("m", "l", "n"))),
        "product of E: found E[m, l, n], which the summed 'n' indexes; limit: outputs without it",
    ),
    "another output": (
        lambda: changed(E=replace(E, dims=("l",))),
        "found E[l]; limit: all dims of the operands but the summed one: l, m",
    ),
    "no columns": (
        lambda: changed(D=replace(D, dims=("n",))),
        "product of E: found 0 dims of D that C lacks; limit: one, the columns of the output",
    ),
    "two weights of different dims": (
        lambda: replace(
            FFN,
            tensors=(*FFN.tensors, Tensor("B_up", ("l", "k"), 2, "input")),
            products=(replace(FFN.products[0], rights=("B", "B_up")), FFN.products[1]),
        ),
        "product of C: found B[n, k] and B_up[l, k]; limit: the same dims",
    ),
    "a tensor that no product has": (
        lambda: replace(FFN, tensors=(*FFN.tensors, Tensor("X", ("m",), 2, "input"))),
        "tensors: found X, which no product has",
    ),
    "a tensor in two places": (
        lambda: with_product(0, rights=("B", "B")),
        "tensors: found B in two places",
    ),
    "a further input of other dims": (
        lambda: replace(
            FFN,
            tensors=(*FFN.tensors, Tensor("bias", ("l",), 2, "input")),
            products=(replace(FFN.products[0], further=("bias",)), FFN.products[1]),
        ),
        "product of C: found 'l' in further input bias; limit: dims that the product runs over: m",
    ),
    "an intermediate as a further input": (
        lambda: with_product(1, further=("C",)),
        "product of E: found C as intermediate; limit: input",
    ),
    "a further input twice": (
        lambda: with_product(0, further=("B",)),
        "tensors: found B in two places",
    ),
    "a reduction of nothing": (
        lambda: replace(FFN, reductions=(Reduction("most", "X", "max", ("n",)),)),
        "reduction 'most': found 'X'; limit: the tensors A, B, C, D, E",
    ),
    "a reduction over another dim": (
        lambda: replace(FFN, reductions=(Reduction("most", "C", "max", ("l",)),)),
        "reduction 'most': found 'l'; limit: dims of C: m, n",
    ),
    "a further input of no product": (
        lambda: matrix_chain(8, [4, 4], further={1: [Further((), 2)]}),
        "further: found product 1; limit: 0 to 0",
    ),
    "no layers": (lambda: assemble(8, 4, Operand(2), []), "widths: found no product"),
    "no widths": (lambda: matrix_chain(8, [4]), "widths: found 1 widths; limit: two"),
    "weights of no batch": (
        lambda: matrix_chain(8, [4, 4], batched_weights=True),
        "batched_weights: found no batch dim",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_what_is_no_chain_is_refused(what: str) -> None:
    make, text = BAD[what]
    with pytest.raises(PlanRefused) as caught:
        make()
    assert text in str(caught.value)
    assert str(caught.value).startswith("chain: ")
    assert caught.value.refusal.instead
