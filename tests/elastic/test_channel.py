"""Tests the channel between agent and worker: one contract for files, queues and sockets, and what
only files have: numbers, garbage, readers that come late, directories that nobody removed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.channels import QueueChannel, SocketChannel, readable, receive_all

from torchft_svc.elastic import channel as channel_module
from torchft_svc.elastic import inotify
from torchft_svc.elastic.channel import (
    KEPT_MESSAGES,
    MAX_MESSAGE_BYTES,
    Channel,
    ChannelRoot,
    FileChannel,
)
from torchft_svc.errors import ChannelClosed, RequestRefused

Pair = tuple[Channel, Channel]
PATIENCE_S = 10.0


@pytest.fixture(params=["files", "polled files", "queues", "sockets"])
def pair(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Pair]:
    """An agent's end and its worker's."""
    ends: Pair
    if request.param == "queues":
        ends = QueueChannel.pair()
    elif request.param == "sockets":
        ends = SocketChannel.pair()
    else:
        if request.param == "polled files":
            monkeypatch.setattr(inotify, "_libc", lambda: None)
        agent = FileChannel.create(tmp_path / "0-0")
        ends = agent, FileChannel.open(tmp_path / "0-0")
    yield ends
    for end in ends:
        end.close()
        end.close()  # may be called twice


def later(action: Callable[[], object]) -> threading.Timer:
    timer = threading.Timer(0.1, action)
    timer.start()
    return timer


def test_messages_arrive_in_order_both_ways(pair: Pair) -> None:
    for sender, receiver in (pair, pair[::-1]):
        for number in range(40):
            sender.send({"number": number, "text": "é\n"})
        assert receive_all(receiver, 40) == [{"number": n, "text": "é\n"} for n in range(40)]
        assert receiver.receive(0) is None


def test_a_receiver_is_woken(pair: Pair) -> None:
    agent, worker = pair
    timer = later(lambda: agent.send({"here": 1}))
    assert worker.receive(PATIENCE_S) == {"here": 1}
    timer.join()


def test_a_receiver_gives_up_at_its_timeout(pair: Pair) -> None:
    begun = time.monotonic()
    assert pair[1].receive(0.05) is None
    assert time.monotonic() - begun >= 0.045


def test_the_descriptor_is_readable_while_there_are_messages(pair: Pair) -> None:
    agent, worker = pair
    descriptor = agent.fileno()
    if descriptor is None:
        pytest.skip("this transport has none")
    assert not readable(descriptor, 0)
    worker.send({"number": 0})
    worker.send({"number": 1})
    assert readable(descriptor, PATIENCE_S)
    assert receive_all(agent, 2) == [{"number": 0}, {"number": 1}]
    assert agent.receive(0) is None
    assert not readable(descriptor, 0)


def test_a_message_of_a_mebibyte_is_the_largest(pair: Pair) -> None:
    agent, worker = pair
    most = {"text": "x" * (MAX_MESSAGE_BYTES - 20)}
    agent.send(most)
    assert worker.receive(PATIENCE_S) == most
    with pytest.raises(RequestRefused, match="bytes"):
        agent.send({"text": "x" * MAX_MESSAGE_BYTES})
    with pytest.raises(RequestRefused, match="no JSON"):
        agent.send({"text": object()})
    agent.send({"still": "there"})
    assert worker.receive(PATIENCE_S) == {"still": "there"}


def test_many_threads_send(pair: Pair) -> None:
    agent, worker = pair
    threads = [
        threading.Thread(target=lambda n=n: [agent.send({"n": n, "i": i}) for i in range(12)])
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    found = receive_all(worker, 48)
    for thread in threads:
        thread.join()
    for n in range(4):
        assert [each["i"] for each in found if each["n"] == n] == list(range(12))


def test_closing_ends_a_wait(pair: Pair) -> None:
    _, worker = pair
    timer = later(worker.close)
    with pytest.raises(ChannelClosed):
        worker.receive(None)
    timer.join()
    with pytest.raises(ChannelClosed):
        worker.receive(0)
    with pytest.raises(ChannelClosed):
        worker.send({})


def test_a_worker_whose_agent_has_closed_it_knows(pair: Pair) -> None:
    agent, worker = pair
    timer = later(agent.close)
    with pytest.raises(ChannelClosed):
        worker.receive(None)
    timer.join()
    with pytest.raises(ChannelClosed):
        worker.receive(PATIENCE_S)


# -- files -----------------------------------------------------------------------------------------


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[FileChannel]:
    end = FileChannel.create(tmp_path / "0-0")
    yield end
    end.close()
    assert not (tmp_path / "0-0").exists()


@pytest.fixture
def inbox(agent: FileChannel) -> Path:
    return agent.directory / "to_worker"


def open_worker(agent: FileChannel) -> FileChannel:
    return FileChannel.open(agent.directory)


def test_a_reader_that_comes_late_or_again_finds_the_newest(agent: FileChannel) -> None:
    for number in range(KEPT_MESSAGES + 10):
        agent.send({"number": number})
    for _ in range(2):
        worker = open_worker(agent)
        found = receive_all(worker, KEPT_MESSAGES)
        assert [each["number"] for each in found] == list(range(10, KEPT_MESSAGES + 10))
        assert worker.receive(0) is None
        worker.close()


def test_a_reader_that_is_overtaken_goes_on_with_the_oldest_there(agent: FileChannel) -> None:
    worker = open_worker(agent)
    agent.send({"number": 0})
    agent.send({"number": 1})
    assert worker.receive(0) == {"number": 0}
    for number in range(2, KEPT_MESSAGES + 10):
        agent.send({"number": number})
    found = receive_all(worker, KEPT_MESSAGES)
    assert [each["number"] for each in found] == list(range(10, KEPT_MESSAGES + 10))
    worker.close()


def test_two_writers_of_a_worker_share_the_numbers(agent: FileChannel) -> None:
    one, other = open_worker(agent), open_worker(agent)
    for number in range(6):
        (one, other)[number % 2].send({"number": number})
    assert [each["number"] for each in receive_all(agent, 6)] == list(range(6))
    for number in range(KEPT_MESSAGES):
        one.send({"number": number})
    receive_all(agent, KEPT_MESSAGES)
    other.send({"after": "many"})
    assert agent.receive(PATIENCE_S) == {"after": "many"}
    assert sorted(path.name for path in agent.directory.iterdir()) == [
        *["agent", "to_agent", "to_worker"]
    ]
    one.close()
    other.close()


def put_half_a_message(inbox: Path) -> None:
    (inbox / "0000000001.json").write_text('{"type": "eve')


def put_a_list(inbox: Path) -> None:
    (inbox / "0000000001.json").write_text("[1, 2]")


def put_too_much(inbox: Path) -> None:
    (inbox / "9999999999.json").write_text("[" * (MAX_MESSAGE_BYTES + 1))


def put_deep_nesting(inbox: Path) -> None:
    (inbox / "9999999999.json").write_text("[" * 100_000)


def put_bytes(inbox: Path) -> None:
    (inbox / "0000000001.json").write_bytes(b"\xff\x00\xfe")


def put_a_directory(inbox: Path) -> None:
    (inbox / "9999999999.json").mkdir()


def put_a_pipe(inbox: Path) -> None:
    os.mkfifo(inbox / "0000000001.json")


def put_a_link(inbox: Path) -> None:
    (inbox / "0000000001.json").symlink_to("/dev/zero")


def put_another_name(inbox: Path) -> None:
    (inbox / "notes.txt").write_text("{}")


@pytest.mark.parametrize(
    "put",
    [
        *[put_half_a_message, put_a_list, put_too_much, put_deep_nesting, put_bytes],
        *[put_a_directory, put_a_pipe, put_a_link, put_another_name],
    ],
)
def test_garbage_is_skipped_with_one_warning(
    agent: FileChannel,
    inbox: Path,
    put: Callable[[Path], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker = open_worker(agent)
    put(inbox)
    assert worker.receive(0.05) is None
    agent.send({"number": 1})
    agent.send({"number": 2})
    assert receive_all(worker, 2) == [{"number": 1}, {"number": 2}]
    assert len(caplog.records) == 1
    assert "ignoring" in caplog.text
    worker.close()


@pytest.mark.parametrize("name", ["8999999999.json", "0000000003.json"])
def test_garbage_does_not_count_for_the_next_number(
    agent: FileChannel, inbox: Path, name: str
) -> None:
    worker = open_worker(agent)
    (inbox / name).mkdir()
    for number in range(KEPT_MESSAGES + 5):  # as many as are not removed, and more
        agent.send({"number": number})
        assert receive_all(worker, 1) == [{"number": number}]
    worker.close()


def test_a_directory_without_a_channel_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ChannelClosed, match="there is no channel"):
        FileChannel.open(tmp_path)


def test_a_removed_directory_ends_waits_and_sends(agent: FileChannel) -> None:
    worker = open_worker(agent)
    timer = later(lambda: channel_module.shutil.rmtree(agent.directory))
    with pytest.raises(ChannelClosed, match="removed"):
        worker.receive(PATIENCE_S)
    timer.join()
    for end in (worker, agent):
        with pytest.raises(ChannelClosed):
            end.send({})
    worker.close()


def test_nothing_stays_open(agent: FileChannel) -> None:
    before = os.listdir("/dev/fd")
    for _ in range(3):
        worker = open_worker(agent)
        worker.receive(0)
        worker.close()
    assert os.listdir("/dev/fd") == before


# -- directories of agents -------------------------------------------------------------------------

_AGENT = """
import sys, time
from pathlib import Path
from torchft_svc.elastic.channel import ChannelRoot
root = ChannelRoot(Path(sys.argv[1]))
root.channel(0, 0).send({"last": "words"})
print(root.directory / "0-0", flush=True)
time.sleep(60)
"""


def test_a_root_is_removed_with_all_its_channels(tmp_path: Path) -> None:
    with ChannelRoot(tmp_path) as root, ChannelRoot(tmp_path) as other:
        assert root.directory != other.directory
        agent = root.channel(1, 2)
        agent.send({})
        assert agent.directory.name == "1-2"
        assert root.directory.stat().st_mode & 0o777 == 0o700
    agent.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.processes
def test_what_a_killed_agent_leaves_is_noticed_and_removed(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _AGENT, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        worker = FileChannel.open(Path(process.stdout.readline().strip()))
        with ChannelRoot(tmp_path):  # it starts while the other one lives
            assert len(list(tmp_path.iterdir())) == 2
        assert worker.receive(PATIENCE_S) == {"last": "words"}
        timer = later(lambda: process.send_signal(signal.SIGKILL))
        with pytest.raises(ChannelClosed, match="its agent has ended"):
            worker.receive(PATIENCE_S)
        timer.join()
        worker.close()
    with ChannelRoot(tmp_path) as root:
        assert list(tmp_path.iterdir()) == [root.directory]
    assert not list(tmp_path.iterdir())
