"""A process that hangs, dies or babbles is replaced, and says why."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from crossfuse.measure.timer import NoAnswer, Peer
from null.meta_schedule.peers import program

MOODY = """
import json, os, signal, subprocess, sys, time
print("ready", flush=True)
for line in sys.stdin:
    mood = json.loads(line)["mood"]
    if mood == "hang":
        time.sleep(60)
    if mood == "die":
        os.kill(os.getpid(), signal.SIGSEGV)
    if mood == "exit":
        sys.exit("no more ideas")
    if mood == "babble":
        print("AUTOTUNE mm", flush=True)
        continue
    if mood == "bear":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        print(json.dumps({"child": child.pid}), flush=True)
        continue
    print(json.dumps({"id": os.getpid()}), flush=True)
"""


@pytest.fixture
def peer():
    made = Peer(program(MOODY))
    yield made
    made.close()


def test_one_process_answers_many_requests(peer: Peer) -> None:
    answers = [peer.ask({"mood": "fine"}, 30)["id"] for _ in range(3)]
    assert len(set(answers)) == 1
    assert peer.running


def test_requests_may_be_sent_ahead(peer: Peer) -> None:
    peer.send({"mood": "fine"})
    peer.send({"mood": "bear"})
    assert "id" in peer.receive(30)
    assert "child" in peer.receive(30)


@pytest.mark.parametrize(
    ("mood", "status", "message"),
    [
        ("hang", "timeout", "no answer in 1 s"),
        ("die", "crashed", "signal 11 without an answer"),
        ("exit", "crashed", "exit code 1 without an answer. no more ideas"),
        ("babble", "crashed", "no JSON in its answer b'AUTOTUNE mm\\n'"),
    ],
)
def test_the_next_request_gets_another_process(
    peer: Peer, mood: str, status: str, message: str
) -> None:
    first = peer.ask({"mood": "fine"}, 30)["id"]
    with pytest.raises(NoAnswer) as caught:
        peer.ask({"mood": mood}, 1 if mood == "hang" else 30)
    assert (caught.value.status, caught.value.message) == (status, message)
    assert not _alive(first)
    assert peer.ask({"mood": "fine"}, 30)["id"] != first


def test_children_are_killed_with_it(peer: Peer) -> None:
    child = peer.ask({"mood": "bear"}, 30)["child"]
    peer.close()
    assert _gone(child)


def test_a_child_that_holds_the_pipe_does_not_hide_that_the_process_died(peer: Peer) -> None:
    peer.ask({"mood": "bear"}, 30)
    with pytest.raises(NoAnswer) as caught:
        peer.ask({"mood": "die"}, 30)
    assert caught.value.status == "crashed"


def test_program_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(NoAnswer, match="the worker does not start"):
        Peer((str(tmp_path / "nothing"),)).ask({}, 5)


def test_nothing_is_started_after_the_end(peer: Peer) -> None:
    peer.retire()
    with pytest.raises(NoAnswer, match="nothing is started any more"):
        peer.ask({"mood": "fine"}, 5)


def test_a_server_ends_with_its_standard_input(peer: Peer) -> None:
    process = peer.ask({"mood": "fine"}, 30)["id"]
    assert peer._process is not None
    assert peer._process.stdin is not None
    peer._process.stdin.close()
    peer._process.wait(30)
    assert _gone(process)


def _gone(process: int) -> bool:
    for _ in range(100):
        if not _alive(process):
            return True
        time.sleep(0.05)
    return False


def _alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z" and os.path.exists(f"/proc/{process}")
