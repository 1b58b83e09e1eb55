"""Chains of kernels that start early: what they touch before they wait, and that they do wait."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cpu.emulate.kernels import image, only, ramp
from crossfuse.emulate.cuda import Link, chain, emulate
from crossfuse.errors import CheckFailed
from crossfuse.lower.image import KernelImage

pytestmark = pytest.mark.cpu

GRID, BLOCK = 3, 64
SHAPE = (GRID, BLOCK)
LET = 'asm volatile("griddepcontrol.launch_dependents;");'
WAIT = 'asm volatile("griddepcontrol.wait;" ::: "memory");'
INPUTS = {"A": ramp(*SHAPE), "W": ramp(*SHAPE)}


def kernel(body: str, *, early: bool = True) -> KernelImage:
    """C = A + W in some order of statements, of CTAs that touch an element of the next one."""
    buffers = [(name, SHAPE, "float32") for name in ("A", "W", "C")]
    start = """
  unsigned i = blockIdx.x * 64 + threadIdx.x, next = (blockIdx.x + 1) % 3 * 64 + threadIdx.x;
  (void)i, (void)next;
"""
    made = image(start + body, buffers, grid=GRID, block=BLOCK)
    return replace(made, launches=(replace(made.launches[0], early=early),))


RIGHT = f"""
  {LET}
  float w = W[i];
  {WAIT}
  C[i] = A[next] + w;
"""


def three(*bodies: str) -> KernelImage:
    """A chain of three: A to first to second to C."""
    first, second, third = (kernel(each, early=n > 0) for n, each in enumerate(bodies))
    return chain(
        [
            Link(first, {"C": "first"}),
            Link(second, {"A": "first", "C": "second"}),
            Link(third, {"A": "second"}),
        ]
    )


def expected() -> np.ndarray:
    value = INPUTS["A"]
    for _ in range(3):
        value = np.roll(value, -1, axis=0) + INPUTS["W"]
    return value


def test_weights_are_read_before_the_wait_and_all_kernels_run_at_once() -> None:
    slow = RIGHT.replace(LET, f"{LET} for (int round = 0; round < 8; ++round) __syncthreads();")
    report = emulate(three(slow, RIGHT, RIGHT), INPUTS, orders=6)
    report.raise_if_wrong()
    assert report.launches == 3
    assert report.at_once == 3
    for run in (report.outputs, *report.later):
        assert np.array_equal(run["C"], expected())


def test_a_kernel_that_lets_nobody_begin_is_over_first() -> None:
    report = emulate(three(*[RIGHT.replace(LET, "")] * 3), INPUTS, orders=4)
    assert report.ok
    assert report.at_once == 1
    # Who has let the next one begin and ended is over.
    assert emulate(three(RIGHT, *[RIGHT.replace(LET, "")] * 2), INPUTS, orders=6).at_once == 2


def test_a_read_before_the_wait() -> None:
    wrong = f"{LET} float a = A[next]; {WAIT} C[i] = a + W[i];"
    found = only(emulate(three(RIGHT, wrong, RIGHT), INPUTS), "early-launch")
    assert found.buffer == "first"
    assert "float a = A[next]" in found.first
    assert found.detail == (
        "reads what a launch before may still be writing: no griddepcontrol.wait comes before"
    )


def test_a_write_before_the_wait() -> None:
    """Of what two kernels before wrote, and the one before reads."""
    wrong = f"{LET} C[i] = 0.0f; {WAIT} C[i] = A[next] + W[i];"
    first, second, third = kernel(RIGHT, early=False), kernel(RIGHT), kernel(wrong)
    links = [Link(first, {"C": "one"}), Link(second, {"A": "one", "C": "other"})]
    back = chain([*links, Link(third, {"A": "other", "C": "one"})])
    found = only(emulate(back, INPUTS), "early-launch")
    assert found.buffer == "one"
    assert "C[i] = 0.0f" in found.first
    assert found.detail == (
        "writes what a launch before may still be writing: no griddepcontrol.wait comes before"
    )
    right = chain([*links, Link(kernel(RIGHT), {"A": "other", "C": "one"})])
    assert emulate(right, INPUTS, orders=6).ok


def test_a_kernel_that_ends_without_waiting() -> None:
    """It reads constants alone, and writes what nobody has touched: the one behind it is wrong."""
    found = only(
        emulate(three(RIGHT, f"{LET} C[i] = W[next] + W[i];", RIGHT), INPUTS), "early-launch"
    )
    assert found.buffer == ""
    assert found.detail == (
        "k__1 has ended, and none of its threads has waited for the launch before: whoever waits "
        "for its end does not know that what lies before it is over; griddepcontrol.wait in one "
        "thread is enough"
    )
    one = f"{LET} if (blockIdx.x == 1 && threadIdx.x == 5) {WAIT} C[i] = W[next] + W[i];"
    assert emulate(three(RIGHT, one, RIGHT), INPUTS, orders=6).ok


def test_a_wait_of_one_thread_is_passed_on_by_barriers() -> None:
    of_one = f"{LET} if (threadIdx.x == 9) {WAIT} BARRIER C[i] = A[next] + W[i];"
    right = of_one.replace("BARRIER", "__syncthreads();")
    assert emulate(three(RIGHT, right, right), INPUTS, orders=6).ok
    found = only(
        emulate(three(RIGHT, of_one.replace("BARRIER", ""), RIGHT), INPUTS), "early-launch"
    )
    assert found.buffer == "first"
    assert found.thread != 9


def test_an_image_that_comes_again_is_in_the_text_once() -> None:
    same = kernel(RIGHT)
    again = chain([Link(same, {"C": "hidden"}), Link(same, {"A": "hidden"})])
    assert again.cuda.count("__global__") == 1
    assert [each.symbol for each in again.launches] == ["k__0", "k__0"]
    assert emulate(again, INPUTS, orders=6).ok


def test_links_that_do_not_fit() -> None:
    right = kernel(RIGHT)
    other = replace(right, buffers=(replace(right.buffers[0], shape=(1, 1)), *right.buffers[1:]))
    fewer = replace(right, buffers=(replace(right.buffers[0], rows=True), *right.buffers[1:]))
    for links, text in (
        ([], "found no link; limit: at least one"),
        ([Link(right, {"X": "A"})], "found X in a link of k; limit: A, W, C"),
        (
            [Link(right, {"C": "H"}), Link(other, {"A": "H"})],
            r"found H with \[3, 64\] of float32 and \[1, 1\] of float32; limit: one shape",
        ),
        (
            [Link(right), Link(right, {"C": "A"})],
            "found A, written behind a link that reads it; limit: inputs left alone",
        ),
        ([Link(fewer)], "found k, which takes fewer rows; limit: images of all rows"),
    ):
        with pytest.raises(CheckFailed, match=text):
            chain(links)
