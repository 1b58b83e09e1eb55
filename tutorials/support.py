"""What the tutorials share: the GPU if there is one, recorded numbers, refusals, pictures."""

from __future__ import annotations

import json
import re
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import crossfuse
from crossfuse.errors import RefusedError

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"
#: Colours of the CTAs of a cluster, in the order of their ranks; matplotlib's own name.
COLOURS = "tab20"


@contextmanager
def refused(text: str) -> Iterator[None]:
    """Print the refusal that the statements inside end in.

    Parameters
    ----------
    text : str
        Part of what the refusal says.

    Raises
    ------
    AssertionError
        If nothing is refused, or for another reason: the page is wrong then.
    """
    try:
        yield
    except RefusedError as error:
        message = str(error)
        assert text in message, f"expected {text!r} in: {message}"
        print(wrapped(f"{type(error).__name__}: {without_places(message)}"))
    else:
        raise AssertionError(f"nothing was refused; expected: {text}")


def without_places(text: str) -> str:
    """Text with paths as they are on every machine and in every run."""
    package = str(Path(crossfuse.__file__).parent.parent)
    text = text.replace(f"{package}/", "")
    return re.sub(re.escape(tempfile.gettempdir()) + r"/[^\s/:]+/", "TMP/", text)


def wrapped(text: str, indent: str = "") -> str:
    """Text in lines of 80 columns, each behind `indent`; words stay whole."""
    return textwrap.fill(
        text,
        80,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def show_lines(text: str, most: int | None = None) -> None:
    """Print the first lines of a text, all of them by default; what does not fit is indented."""
    for line in text.splitlines()[:most]:
        print(wrapped(line, "  ").lstrip())


def loops_text(script: str) -> str:
    """Loops, blocks and statements of a function's script, without indices and regions."""
    shown = re.compile(r"\s*(for |with T\.(sblock|init)\(|\w+\[.*\] = )")
    return textwrap.dedent("\n".join(each for each in script.splitlines() if shown.match(each)))


def hopper() -> str:
    """Name of the Hopper GPU that is here; "" if there is none."""
    from crossfuse.hardware import find_gpus

    found = [each.name for each in find_gpus()]
    return next((each for each in found if "H100" in each or "H200" in each), "")


def recorded(file: str) -> tuple[dict[str, Any], str]:
    """Read a file of ``benchmarks/results``.

    Parameters
    ----------
    file : str
        Its name.

    Returns
    -------
    tuple[dict, str]
        What it says, and where that comes from: device, date and file.
    """
    found = json.loads((RESULTS / file).read_text())
    made = found["environment"]
    return found, f"recorded on {made['gpu']['name']}, {made['date']} ({file})"


def recorded_kernels(file: str) -> tuple[list[dict[str, Any]], str]:
    """Read the kernels that a file of ``benchmarks/results`` has times of.

    Parameters
    ----------
    file : str
        Its name; a JSON document a line, each with a ``candidate`` and its ``microseconds``.

    Returns
    -------
    tuple[list[dict], str]
        The lines with a time, and where they come from: devices and file.
    """
    lines = (RESULTS / file).read_text().splitlines()
    found = [each for each in map(json.loads, lines) if each["status"] == "ok"]
    gpus = sorted({each["gpu"] for each in found})
    return found, f"recorded on {', '.join(gpus)} ({file})"


def measured_here(schedule: Any) -> float:
    """Microseconds of a scheduled function on this machine's GPU, weights cold, in a CUDA graph.

    Parameters
    ----------
    schedule : tvm.s_tir.Schedule
        What is compiled and run, on random inputs.
    """
    import crossfuse
    from crossfuse.compiler.measure import time_kernel
    from crossfuse.compiler.problem import make_problem

    compiled = crossfuse.compile(schedule)
    problem = make_problem(compiled.source, compiled.schedule)
    return time_kernel(compiled, problem).microseconds


def kernel_text(image: Any) -> str:
    """The last generated kernel, without the helpers in front of it."""
    text = str(image.cuda)
    return text[text.rindex('extern "C" __global__') :].strip()


def show_owners(ax: Any, owners: np.ndarray, title: str, ctas: int) -> None:
    """Draw a matrix, each element in the colour of the CTA that holds it.

    Parameters
    ----------
    ax : matplotlib.axes.Axes
        Where.
    owners : numpy.ndarray
        Rank of each element's CTA; -1 where it is no matter of this cluster.
    title : str
        Above it.
    ctas : int
        CTAs of the cluster.
    """
    from matplotlib import colormaps

    ax.imshow(
        np.ma.masked_less(owners, 0),
        cmap=colormaps[COLOURS].resampled(20),
        vmin=-0.5,
        vmax=19.5,
        interpolation="nearest",
        aspect="equal",
    )
    ax.set_title(title, fontsize=9)
    ax.set_xlim(-0.5, owners.shape[1] - 0.5)
    ax.set_ylim(owners.shape[0] - 0.5, -0.5)
    ax.tick_params(labelsize=7)
    for rank in range(ctas):
        rows, columns = np.nonzero(owners == rank)
        if rows.size:
            middle = (columns.min() + columns.max()) / 2, (rows.min() + rows.max()) / 2
            ax.text(*middle, str(rank), ha="center", va="center", fontsize=9, weight="bold")


def show_bars(ax: Any, names: Sequence[str], parts: dict[str, Sequence[float]], unit: str) -> None:
    """Draw stacked bars that lie on their side, a bar for each name and a colour for each part."""
    left = np.zeros(len(names))
    for part, values in parts.items():
        ax.barh(names, values, left=left, label=part)
        left += np.asarray(values, dtype=float)
    ax.invert_yaxis()
    ax.set_xlabel(unit)
    ax.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
