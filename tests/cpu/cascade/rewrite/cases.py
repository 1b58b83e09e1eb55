"""Cascades that stream in tests: functions, inputs, and two-pass references in any precision."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

import cascade_functions as functions
from crossfuse.cascade.algebra import derive
from crossfuse.cascade.detect import detect
from crossfuse.cascade.rewrite.streaming import streaming
from crossfuse.cascade.rewrite.tiles import StreamTiles
from crossfuse.cascade.spec import Site
from crossfuse.schedule.rules.stream import schedule_stream

Arrays = Mapping[str, np.ndarray]


def softmax(arrays: Arrays, dtype: str) -> np.ndarray:
    x = arrays["X"].astype(dtype)
    with np.errstate(invalid="ignore"):
        powers = np.exp(x - x.max(axis=1, keepdims=True))
        # A row without any element that counts is 0, not 0/0.
        return np.nan_to_num(powers / powers.sum(axis=1, keepdims=True), nan=0.0)


def cross_entropy(arrays: Arrays, dtype: str) -> np.ndarray:
    x = arrays["X"].astype(dtype)
    m = x.max(axis=1)
    with np.errstate(invalid="ignore"):
        s = np.exp(x - m[:, None]).sum(axis=1)
        return m + np.log(s) - np.take_along_axis(x, arrays["T"][:, None], 1)[:, 0]


def variance(arrays: Arrays, dtype: str) -> np.ndarray:
    x = arrays["X"].astype(dtype)
    apart = x - x.mean(axis=1, keepdims=True)
    return (apart * apart).mean(axis=1)


def layer_norm(arrays: Arrays, dtype: str) -> np.ndarray:
    x, gamma, beta = (arrays[name].astype(dtype) for name in "XGB")
    apart = x - x.mean(axis=1, keepdims=True)
    spread = (apart * apart).mean(axis=1, keepdims=True)
    return apart / np.sqrt(spread + np.asarray(1e-5, dtype)) * gamma + beta


def inertia(arrays: Arrays, dtype: str) -> np.ndarray:
    mass, place = arrays["M"].astype(dtype), arrays["P"].astype(dtype)
    total = mass.sum(axis=1)
    with np.errstate(invalid="ignore"):
        centre = (mass[..., None] * place).sum(axis=1) / total[:, None]
    return (mass * ((place - centre[:, None]) ** 2).sum(axis=2)).sum(axis=1)


@dataclass(frozen=True)
class Case:
    """One cascade: its function of rows and length, its reference."""

    function: Callable[..., Any]
    reference: Callable[[Arrays, str], np.ndarray]
    output: str


CASES = {
    "softmax": Case(functions.softmax, softmax, "Y"),
    "cross_entropy": Case(functions.cross_entropy, cross_entropy, "L"),
    "variance": Case(functions.variance, variance, "V"),
    "layer_norm": Case(functions.layer_norm, layer_norm, "Y"),
    "inertia": Case(functions.inertia, inertia, "I"),
}
#: What rows are made of.
CONTENTS = ("random", "large", "shifted", "far", "constant", "infinities", "masked", "zeros")
#: What "shifted" and "far" add: half of the last place of a mean is 1e-4 and 0.03 deviations.
SHIFT, FAR = 3000.0, 1e6


@cache
def site_of(name: str, rows: int, length: int, dtype: str = "float32") -> Site:
    (site,) = detect(CASES[name].function(rows, length, dtype))
    return site


def stream_of(site: Site, tiles: StreamTiles) -> Any:
    """The streaming function."""
    return streaming(site, derive(site.cascade), tiles)


def scheduled(name: str, rows: int, length: int, tiles: StreamTiles, dtype: str = "float32") -> Any:
    """The streaming function on threads, CTAs and clusters."""
    return schedule_stream(stream_of(site_of(name, rows, length, dtype), tiles), tiles)


def inputs(
    name: str, rows: int, length: int, contents: str = "random", dtype: str = "float32"
) -> dict[str, np.ndarray]:
    """Arguments of a function, by the names of its buffers."""
    random = np.random.default_rng(rows * 1009 + length)
    x = random.standard_normal((rows, length))
    x = {
        "random": x,
        "large": 1000 * x,
        "shifted": x + SHIFT,
        "far": x + FAR,
        "constant": np.full_like(x, SHIFT + 1 / 3),
        "infinities": np.where(random.random((rows, length)) < 0.5, -np.inf, x),
        "masked": np.full_like(x, -np.inf),
        "zeros": np.zeros_like(x),
    }[contents]
    if name == "inertia":
        mass = np.zeros((rows, length)) if contents == "zeros" else random.random((rows, length))
        place = x[..., None] + random.standard_normal((rows, length, 3))
        return {"M": mass.astype(dtype), "P": place.astype(dtype)}
    found = {"X": x.astype(dtype)}
    if name == "cross_entropy":
        found["T"] = random.integers(0, length, rows).astype("int32")
    if name == "layer_norm":
        found |= {each: random.standard_normal(length).astype(dtype) for each in "GB"}
    return found


def each_kind(name: str, rows: int, length: int) -> tuple[dict[str, np.ndarray], dict[str, slice]]:
    """Arguments with rows of each kind that a cascade takes, and where they lie."""
    masks = name in ("softmax", "cross_entropy")
    kinds = [each for each in CONTENTS if masks or each not in ("infinities", "masked")]
    parts = [inputs(name, rows, length, each) for each in kinds]
    arrays = {
        key: value if key in "GB" else np.concatenate([part[key] for part in parts])
        for key, value in parts[0].items()
    }
    return arrays, {kind: slice(i * rows, (i + 1) * rows) for i, kind in enumerate(kinds)}


def of_rows(arrays: Arrays, rows: slice) -> dict[str, np.ndarray]:
    """The arguments of some rows."""
    return {key: value if key in "GB" else value[rows] for key, value in arrays.items()}


def assert_close(got: np.ndarray, name: str, arrays: Arrays) -> None:
    """Hold a result to twice the error of the two-pass form in single precision."""
    case = CASES[name]
    wanted = case.reference(arrays, "float64")
    unfused = case.reference(arrays, "float32")
    assert got.shape == wanted.shape
    np.testing.assert_array_equal(np.isnan(got), np.isnan(wanted))
    np.testing.assert_array_equal(np.isinf(got), np.isinf(wanted))
    known = np.isfinite(wanted)
    scale = np.abs(wanted[known]).max(initial=0.0)
    error = np.abs(got[known] - wanted[known]).max(initial=0.0)
    allowed = 2 * np.abs(unfused[known] - wanted[known]).max(initial=0.0)
    assert error <= allowed + 4 * np.finfo("float32").eps * scale, (error, allowed, scale)
