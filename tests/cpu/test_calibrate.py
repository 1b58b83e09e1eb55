"""The calibration programs compile, and what goes wrong with them is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from crossfuse.bench import calibrate as module
from crossfuse.bench.calibrate import PROGRAMS, TYPES, Program, build, calibrate, measure, products
from crossfuse.errors import EnvironmentRefused
from null.planner.test_calibration_programs import MACHINE, printed

LINE = '{"name": "flag", "value": 1.0, "spread": 0.1, "repeats": 11}'


def narrow(program: Program) -> Program:
    """The same with the narrowest and the widest tile alone: a sixth of the time to compile."""
    if not program.headers:
        return program
    dtype = program.name.removeprefix("tensor-")
    return Program(program.name, program.source, {"products.cuh": products(dtype, (8, 256))})


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_programs_compile_without_a_warning(program: Program, tmp_path: Path) -> None:
    executable = build(narrow(program), tmp_path)
    assert executable.read_bytes().startswith(b"\x7fELF")


def test_what_the_compiler_says_is_passed_on(tmp_path: Path) -> None:
    broken = Program("tensor-bfloat16", "tensor.cu", {"products.cuh": "#error no products"})
    with pytest.raises(EnvironmentRefused) as caught:
        build(broken, tmp_path)
    assert "program tensor-bfloat16 (tensor.cu)" in str(caught.value)
    assert "no products" in caught.value.refusal.found


def script(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


FLAG = next(each for each in PROGRAMS if each.name == "flag")


def test_lines_are_read(tmp_path: Path) -> None:
    assert measure(FLAG, script(tmp_path, "run", f"echo '{LINE}'")) == [json.loads(LINE)]


def test_a_wait_that_did_not_end_is_told(tmp_path: Path) -> None:
    fault = "echo 'a wait did not end: code 31 (flag.cu:70)' >&2; exit 3"
    with pytest.raises(EnvironmentRefused, match=r"flag \(flag.cu\): .*exit code 3: .*code 31"):
        measure(FLAG, script(tmp_path, "run", fault))


def test_a_program_that_hangs_is_stopped(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentRefused, match=r"found no end after 0.2 s"):
        measure(FLAG, script(tmp_path, "run", "exec sleep 60"), timeout=0.2)


def fake(monkeypatch: pytest.MonkeyPatch, folder: Path, texts: dict[str, str]) -> None:
    """Programs are shell scripts."""

    def build(program: Program, *rest: object) -> Path:
        return script(folder, program.name, texts[program.name])

    monkeypatch.setattr(module, "build", build)
    monkeypatch.setattr(module, "find_nvcc", lambda: None)


def test_all_lines_make_the_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = "\n".join(map(json.dumps, printed()))
    texts = {"flag": f"cat <<END\n{rows}\nEND", "launch": f"echo '{LINE}'"}
    fake(monkeypatch, tmp_path, texts)
    noted: list[str] = []
    programs = [each for each in PROGRAMS if each.name in texts]
    record = calibrate("nvidia-h100", lambda: MACHINE, programs, noted.append)
    assert not record.provisional
    assert record.machine == MACHINE
    assert noted[0] == "2 programs compiled"
    assert len(noted) == len(printed()) + 2


def test_others_run_after_a_fault(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    texts = {"flag": "exit 3", "launch": f"echo '{LINE}'"}
    fake(monkeypatch, tmp_path, texts)
    noted: list[str] = []
    programs = sorted((each for each in PROGRAMS if each.name in texts), key=lambda it: it.name)
    with pytest.raises(EnvironmentRefused, match=r"program flag \(flag.cu\): found exit code 3"):
        calibrate("nvidia-h100", lambda: MACHINE, programs, noted.append)
    assert json.loads(noted[-1]) == json.loads(LINE)


def test_every_type_has_a_program() -> None:
    names = {each.name for each in PROGRAMS}
    assert {f"tensor-{dtype}" for dtype in TYPES} <= names
