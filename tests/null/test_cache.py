"""The cache: whole entries or none, one maker at a time, the least recently used go first."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from crossfuse.cache import (
    LIMIT,
    Entry,
    Shelf,
    answered,
    content_key,
    itself,
    kept,
    limit_bytes,
    package_hash,
    prune,
    root,
    shelf,
)
from crossfuse.cli import app
from crossfuse.errors import EnvironmentRefused, PlanRefused, RefusedError, refuse
from crossfuse.hardware import device

MAKER = """
import sys, time
from pathlib import Path
from crossfuse.cache import Entry, Shelf, itself
folder = Path(sys.argv[1])
def make():
    (folder / f"made-{sys.argv[2]}").touch()
    time.sleep(0.5)
    return Entry(b"content" * 1000, {"label": "made"})
print(len(Shelf(folder, ".entry").made("ab12", make, itself).data))
"""
# Is killed between the first half of a file and its name, holding the lock.
KILLED = """
import os, signal, sys
from pathlib import Path
from crossfuse.cache import Entry, Shelf, itself
from crossfuse import files
def stop(*names):
    print("half", flush=True)
    signal.pause()
os.replace = stop
Shelf(Path(sys.argv[1]), ".entry").made("ab12", lambda: Entry(b"content", {}), itself)
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of this test alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return root()


def start(program: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def never() -> Entry:
    raise AssertionError("made again")


def test_processes_that_need_the_same_make_it_once(tmp_path: Path) -> None:
    makers = [start(MAKER, str(tmp_path), str(number)) for number in range(4)]
    assert [each.communicate()[0] for each in makers] == ["7000\n"] * 4
    assert len(list(tmp_path.glob("made-*"))) == 1
    assert Shelf(tmp_path, ".entry").made("ab12", never, itself).about == {"label": "made"}


def test_a_killed_writer_leaves_neither_an_entry_nor_a_lock(tmp_path: Path) -> None:
    folder = tmp_path / "kind"
    writer = start(KILLED, str(folder))
    assert writer.stdout and writer.stdout.readline() == "half\n"
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    assert Shelf(folder, ".entry").read("ab12", itself) is None
    assert (
        Shelf(folder, ".entry").made("ab12", lambda: Entry(b"again", {}), itself).data == b"again"
    )
    # Its half of a file is nobody's entry, and goes when it is old enough.
    (half,) = folder.glob(".ab12.entry-*")
    assert [each.path.name for each in kept(tmp_path)] == ["ab12.entry"]
    prune(tmp_path)
    assert half.exists()
    os.utime(half, (0, 0))
    prune(tmp_path)
    assert not half.exists()


@pytest.mark.parametrize("cut", [0, 1, 40, -1])
def test_a_damaged_entry_is_made_again(tmp_path: Path, cut: int) -> None:
    some = Shelf(tmp_path, ".entry")
    some.made("ab12", lambda: Entry(b"content", {"label": "x"}), itself)
    path = some.path("ab12")
    path.write_bytes(path.read_bytes()[:cut])
    assert some.read("ab12", itself) is None
    assert some.made("ab12", lambda: Entry(b"content", {}), itself).data == b"content"
    assert some.made("ab12", never, itself).data == b"content"


def test_what_makes_it_may_fail(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="made again"):
        Shelf(tmp_path, ".entry").made("ab12", never, itself)
    assert Shelf(tmp_path, ".entry").read("ab12", itself) is None


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    some = Shelf(tmp_path / "file" / "below", ".entry")
    assert some.made("ab12", lambda: Entry(b"content", {}), itself).data == b"content"
    assert some.read("ab12", itself) is None


def filled(count: int = 4, kind: str = "library") -> Shelf:
    """Entries of a megabyte; the first was used longest ago."""
    some = shelf(kind)
    for number in range(count):
        key = f"key{number}"
        some.write(key, Entry(bytes(2**20), {"label": f"entry {number}"}))
        os.utime(some.path(key), (number, number))
    return some


def test_what_was_not_used_for_longest_goes_first(home: Path) -> None:
    some = filled()
    assert some.read("key0", itself)  # is used now
    gone = prune(limit=5 * 2**19)
    assert [each.path.name for each in gone] == ["key1.library", "key2.library"]
    assert [each.path.stem for each in kept()] == ["key3", "key0"]
    assert prune() == ()


def test_a_write_keeps_the_cache_below_its_limit(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LIMIT, "3")
    filled(6)
    assert sum(each.size for each in kept()) <= limit_bytes()
    assert {each.path.stem for each in kept()} >= {"key5"}


def test_a_limit_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIMIT, "2G")
    with pytest.raises(EnvironmentRefused, match="found '2G'; limit: a whole number of MiB"):
        limit_bytes()


def test_a_limit_that_is_no_number_loses_nothing_that_was_made(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CROSSFUSE_CACHE_LIMIT", "much")
    assert shelf("kernels").made("k", lambda: Entry(b"made", {}), lambda each: each.data) == b"made"


def test_answers_and_refusals_are_kept(tmp_path: Path) -> None:
    some, asked = Shelf(tmp_path, ".plan"), []

    def no(family: type[RefusedError]) -> Any:
        def make() -> str:
            asked.append(family)
            raise refuse(family, "rule", "chain", found="a", limit="b", instead="c")

        return make

    assert answered(some, "aa", "a plan", lambda: "text", str) == "text"
    assert answered(some, "aa", "a plan", str, str) == "text"
    for make in (no(PlanRefused), str):
        with pytest.raises(PlanRefused, match=r"rule: chain: found a; limit: b\. Instead: c\."):
            answered(some, "bb", "a plan", make, str)
    for _ in range(2):  # tomorrow the compiler may be there
        with pytest.raises(EnvironmentRefused):
            answered(some, "cc", "a plan", no(EnvironmentRefused), str)
    assert asked == [PlanRefused, EnvironmentRefused, EnvironmentRefused]


def test_keys_tell_apart_what_makes_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    h100, h200 = device("nvidia-h100"), device("nvidia-h200")
    keys = {
        content_key(h100, "ab", "c"),
        content_key(h100, "a", "bc"),
        content_key(h200, "ab", "c"),
    }
    assert content_key(h100, "ab", "c") in keys
    before = package_hash()
    monkeypatch.setattr("crossfuse.cache.installed_version", lambda _: "9.9")
    keys.add(content_key(h100, "ab", "c"))
    monkeypatch.setattr("crossfuse.cache.package_hash", lambda: f"{before}x")
    keys.add(content_key(h100, "ab", "c"))
    assert len(keys) == 5


def run(*arguments: str) -> Any:
    result = CliRunner().invoke(app, ["cache", *arguments, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_the_command_line(home: Path) -> None:
    filled(2)
    filled(1, "cubin")
    (home / "emulate").mkdir()
    (home / "emulate" / "kernel-1").write_bytes(b"no entry")
    assert [each["label"] for each in run("list", "library")] == ["entry 1", "entry 0"]
    assert {each["kind"] for each in run("list")} == {"library", "cubin", "emulate"}
    found = run("info")
    assert (found["folder"], found["limit"]) == (str(home), 2**31)
    assert found["kinds"]["library"]["entries"] == 2
    text = CliRunner().invoke(app, ["cache", "list"]).stdout
    assert "entry 1" in text and "kernel-1" in text
    assert "library        2 entries   2.0 MiB" in CliRunner().invoke(app, ["cache", "info"]).stdout
    assert run("prune", "--limit", "1")["removed"] == 3
    filled(2)
    assert run("clear", "cubin") == {"removed": 0, "bytes": 0}
    assert run("clear")["removed"] == 3
    assert kept() == ()
