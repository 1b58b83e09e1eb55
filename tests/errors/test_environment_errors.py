"""A machine that lacks something is refused with the sentence that mends it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import crossfuse
from crossfuse import _compat
from crossfuse._compat import VersionRefused, check_versions
from crossfuse.errors import EnvironmentRefused
from crossfuse.runtime import nvcc

PACKAGE_PARENT = Path(crossfuse.__path__[0]).parent
FFI_CRASH = (
    "Crossfuse needs apache-tvm-ffi==0.1.14.post1 but found 0.1.15.post2, which crashes in JSON "
    "serialisation: run `pip install 'apache-tvm-ffi==0.1.14.post1'`."
)


def pretend(monkeypatch: pytest.MonkeyPatch, tvm: str | None, ffi: str | None) -> None:
    versions = {"apache-tvm": tvm, "apache-tvm-ffi": ffi}
    monkeypatch.setattr(_compat, "installed_version", versions.get)


def install_metadata(folder: Path, distribution: str, version: str) -> None:
    info = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
    )


def test_pinned_versions_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "0.27.0.post1", "0.1.14.post1")
    check_versions()


@pytest.mark.parametrize(
    ("tvm", "ffi", "sentence"),
    [
        ("0.27.0.post1", "0.1.15.post2", FFI_CRASH),
        (
            "0.28.0",
            "0.1.14.post1",
            "Crossfuse needs apache-tvm==0.27.0.post1 but found 0.28.0, whose interface differs: "
            "run `pip install 'apache-tvm==0.27.0.post1'`.",
        ),
        (
            None,
            "0.1.14.post1",
            "Crossfuse needs apache-tvm==0.27.0.post1 but found nothing installed: "
            "run `pip install 'apache-tvm==0.27.0.post1'`.",
        ),
        (
            None,
            None,
            "Crossfuse needs apache-tvm==0.27.0.post1 but found nothing installed: "
            "run `pip install 'apache-tvm==0.27.0.post1' 'apache-tvm-ffi==0.1.14.post1'`.",
        ),
    ],
    ids=["crashing ffi", "newer tvm", "no tvm", "neither"],
)
def test_other_versions_are_refused_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, tvm: str | None, ffi: str | None, sentence: str
) -> None:
    pretend(monkeypatch, tvm, ffi)
    with pytest.raises(VersionRefused) as caught:
        check_versions()
    assert str(caught.value) == sentence
    assert isinstance(caught.value, EnvironmentRefused)
    assert isinstance(caught.value, ImportError)


def test_import_fails_as_an_import_error(tmp_path: Path) -> None:
    install_metadata(tmp_path, "apache-tvm-ffi", "0.1.15.post2")
    program = (
        "try:\n"
        "    import crossfuse\n"
        "except ImportError as error:\n"
        "    import sys\n"
        "    print(error, 'tvm_ffi' in sys.modules)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(PACKAGE_PARENT)])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout == f"{FFI_CRASH} False\n"


def test_advice_agrees_with_the_package_metadata() -> None:
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    for pin in _compat.PINS:
        assert f'"{pin.requirement}"' in project
    for wheel in nvcc.WHEELS:
        assert f'"{wheel}==13.0.*"' in project
