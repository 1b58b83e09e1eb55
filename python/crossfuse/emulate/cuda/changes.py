"""Mutations of a call that synchronises: weaker instructions in its helper, and other arguments."""

from __future__ import annotations

import re
from collections.abc import Iterator

#: Instructions of helpers, and weaker ones: a description, a pattern and what takes its place.
_WEAKER: tuple[tuple[str, str, str], ...] = (
    ("the scope of a wait is the CTA", r"(wait\.parity\.acquire)\.cluster", r"\1.cta"),
    ("a relaxed wait", r"(wait\.parity)\.acquire", r"\1.relaxed"),
    ("a relaxed arrival", r"(cluster\.arrive)\.release", r"\1.relaxed"),
    ("a relaxed arrival", r"(mbarrier\.arrive)(\.shared::cluster)", r"\1.relaxed.cluster\2"),
    ("a relaxed arrival", r"(mbarrier\.arrive)(\.shared\.)", r"\1.relaxed.cta\2"),
    ("a relaxed release", r"red\.release\.", r"red.relaxed."),
    ("a release to the CTA", r"red\.release\.gpu", r"red.release.cta"),
    ("a release to the cluster", r"red\.release\.gpu", r"red.release.cluster"),
    ("a relaxed acquire", r"ld\.acquire\.", r"ld.relaxed."),
    ("an acquire from the CTA", r"ld\.acquire\.gpu", r"ld.acquire.cta"),
    ("an acquire from the cluster", r"ld\.acquire\.gpu", r"ld.acquire.cluster"),
    ("a fence of the other memory", r"(fence\.proxy\.async)\.shared::cta", r"\1.global"),
    ("a fence of the other memory", r"(fence\.proxy\.async)\.global", r"\1.shared::cta"),
    ("no fence", r'asm volatile\("fence\.proxy\.async[^;]*;"[^;]*;', ""),
    ("no __syncwarp", r"__syncwarp\(\);", ""),
    ("a wait for reads alone", r"(cp\.async\.bulk\.wait_group) (?=\d)", r"\1.read "),
)
_GROUPS = re.compile(r"(wait_group(?:\.read|\.sync\.aligned)?) (\d+);")


def weaker(definition: str) -> Iterator[tuple[str, str]]:
    """Weaker forms of a helper's text: pairs of what is weaker, and the text."""
    for what, pattern, by in _WEAKER:
        changed, count = re.subn(pattern, by, definition, count=1)
        body = changed[changed.index("{") :]
        if count and re.sub(r"\s", "", body) != "{}":  # that is a call left out
            yield what, changed
    found = _GROUPS.search(definition)
    if found:
        more = f"{found[1]} {int(found[2]) + 1};"
        yield (
            "a group more may be under way",
            definition[: found.start()] + more + definition[found.end() :],
        )


#: By what the name of a call contains: arguments that are changed, and to what.
ARGUMENTS: tuple[tuple[str, int, str, str, str], ...] = (
    ("cuda_mbarrier_wait", 0, "(void*)((char*){} + 8)", "place", "the barrier beside it"),
    ("ptx_mbarrier_arrive", 0, "{} + 8", "place", "the barrier beside it"),
    ("cuda_mbarrier_wait", 1, "{} ^ 1", "parity", "the other parity"),
    ("expect_tx", 1, "{} + 16", "count", "16 bytes more"),
    ("expect_tx", 1, "{} - 16", "count", "16 bytes less"),
    ("mbarrier_init_init", 1, "{} + 1", "count", "an arrival more is expected"),
    ("mbarrier_init_init", 1, "{} - 1", "count", "an arrival less is expected"),
    ("mbarrier_arrive_arrive", 1, "{} + 1", "count", "an arrival more"),
    ("ptx_bar_", 1, "{} + 32", "count", "a warp more is expected"),
    ("ptx_bar_", 1, "{} - 32", "count", "a warp less is expected"),
    ("ptx_bar_", 0, "{} + (threadIdx.x >> 5 & 1) * 7", "count", "another barrier, for odd warps"),
    ("crossfuse_await_flags", 2, "{} - 1", "count", "a flag less is awaited"),
    ("crossfuse_await_flags", 4, "{} - 1", "count", "a count less is awaited"),
    ("crossfuse_await_flags", 4, "{} + 1", "count", "a count more is awaited"),
)


#: Of helpers that issue copies: the parameter that is the barrier which counts their bytes.
_COUNTED_BY = re.compile(r"\b__mbar\b")


def barrier_position(definition: str) -> int | None:
    """Position of a copy's argument that is the barrier counting its bytes; None without one.

    The definition is that of the helper that issues the copy.
    """
    parameters = definition.partition("(")[2].partition(")")[0].split(",")
    return next((i for i, each in enumerate(parameters) if _COUNTED_BY.search(each)), None)


#: Calls that tell others of something, once: what they do twice tells them too early.
TOLD_TWICE = re.compile(r"ptx_mbarrier_arrive|raise_flag")
#: Calls that one thread of several may not make for the others: what each knows or has done itself.
BY_ALL = re.compile(r"fence_proxy|cuda_mbarrier_wait|griddepcontrol_wait")
