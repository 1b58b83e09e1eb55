"""The upstream releases that the project is built against, and the guard that holds them.

The guard reads package metadata only: it must be able to speak before a wrong `tvm_ffi` is loaded,
because such a library ends the interpreter where an exception is due.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata

from crossfuse.errors import EnvironmentRefused, Refusal

_JSON_CRASH = "which crashes in JSON serialisation"


@dataclass(frozen=True)
class Pin:
    """An upstream package and the only release of it that the project runs on."""

    #: Name on PyPI.
    distribution: str
    version: str
    #: Releases known not to work, each with what is wrong with it as a relative clause.
    faults: tuple[tuple[str, str], ...] = ()

    @property
    def requirement(self) -> str:
        """The pin as pip reads it, such as ``"apache-tvm==0.27.0.post1"``."""
        return f"{self.distribution}=={self.version}"


PINS = (
    Pin("apache-tvm", "0.27.0.post1"),
    Pin(
        "apache-tvm-ffi",
        "0.1.14.post1",
        faults=(("0.1.15.post1", _JSON_CRASH), ("0.1.15.post2", _JSON_CRASH)),
    ),
)


class VersionRefused(EnvironmentRefused, ImportError):
    """An upstream package is missing or of another release, so the package cannot be imported."""

    def __str__(self) -> str:
        facts = self.refusal
        return (
            f"Crossfuse needs {facts.where}{facts.limit} but found {facts.found}: {facts.instead}."
        )


def installed_version(distribution: str) -> str | None:
    """The version of an installed package, read without importing it; None if there is none."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def version_refusals() -> tuple[Refusal, ...]:
    """The pins that this environment does not meet, one refusal each.

    Each refusal's advice is one command that mends all of them.
    """
    versions = {pin: installed_version(pin.distribution) for pin in PINS}
    unmet = {pin: version for pin, version in versions.items() if version != pin.version}
    command = " ".join(f"'{pin.requirement}'" for pin in unmet)
    return tuple(
        Refusal(
            rule="upstream-version",
            where=pin.distribution,
            found=_describe(pin, version),
            limit=f"=={pin.version}",
            instead=f"run `pip install {command}`",
        )
        for pin, version in unmet.items()
    )


def check_versions() -> None:
    """Raise `VersionRefused` unless the pinned upstream releases are installed."""
    refusals = version_refusals()
    if refusals:
        raise VersionRefused(refusals[0])


def _describe(pin: Pin, version: str | None) -> str:
    if version is None:
        return "nothing installed"
    fault = dict(pin.faults).get(version, "whose interface differs")
    return f"{version}, {fault}"
