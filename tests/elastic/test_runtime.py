"""Tests the worker API against an agent's end of a channel, and under plain torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import timeit
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import torch.distributed as dist
from support.channels import QueueChannel, SocketChannel, receive_all
from support.fake_agents import healthy, paused
from support.running import ROOT, eventually

from torchft_svc.elastic import (
    WorkerEvent,
    WorkerInfo,
    WorkerState,
    WorldChangeEvent,
    ack_worker_event,
    get_worker_event,
    get_worker_info,
    init_world,
    leave_world,
    on_worker_event,
    runtime,
    wait_for_worker_event,
    world_changed,
)
from torchft_svc.elastic.channel import Channel, FileChannel
from torchft_svc.elastic.messages import (
    EndNotice,
    WorkerAck,
    WorkerLeft,
    WorkerStarted,
    worker_message,
)
from torchft_svc.elastic.runtime import agent_message
from torchft_svc.errors import (
    ChannelClosed,
    ConfigError,
    DeadlineExceeded,
    RequestRefused,
    WorkerEnding,
    WorldSuperseded,
)

PATIENCE_S = 20.0
UP, DOWN = WorldChangeEvent.SCALE_UP, WorldChangeEvent.SCALE_DOWN
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "ROLE_RANK": "0",
    "ROLE_WORLD_SIZE": "1",
    "MASTER_ADDR": "host",
    "MASTER_PORT": "29500",
}


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    before = dict(os.environ)
    yield
    runtime.use_channel(None)
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FileChannel]:
    """The agent's end of the channel of this process."""
    end = FileChannel.create(tmp_path / "0-0")
    monkeypatch.setenv("TORCHFT_WORKER_CHANNEL", str(end.directory))
    yield end
    end.close()


def send_event(agent: Channel, event: WorkerEvent) -> WorkerEvent:
    agent.send(event.to_message())
    return event


def later(action: Callable[[], object]) -> threading.Timer:
    timer = threading.Timer(0.1, action)
    timer.start()
    return timer


def said(agent: Channel, count: int) -> list[object]:
    return [worker_message(each) for each in receive_all(agent, count, PATIENCE_S)]


# -- with an agent ---------------------------------------------------------------------------------


def test_the_first_event_is_there_and_the_agent_learns_of_the_start(agent: FileChannel) -> None:
    event = send_event(agent, healthy(1, 0, 2, 29500))
    assert get_worker_event() == event
    assert get_worker_info() == event.worker_info
    assert not world_changed()
    assert said(agent, 1) == [WorkerStarted(os.getpid())]
    assert agent.receive(0) is None


def test_a_worker_that_is_ended_before_its_first_event_knows_why(agent: FileChannel) -> None:
    agent.send(EndNotice("worker 1 failed").to_message())
    began_at = time.monotonic()
    for ask in (get_worker_event, get_worker_info):
        with pytest.raises(WorkerEnding, match="worker 1 failed"):
            ask()
    assert time.monotonic() - began_at < PATIENCE_S


def test_a_worker_without_a_world_is_paused_and_waits_for_one(agent: FileChannel) -> None:
    expected = send_event(agent, paused(1, 3))
    assert get_worker_event() == expected
    with pytest.raises(DeadlineExceeded, match="waiting for a world"):
        get_worker_info(0.05)
    timer = later(lambda: send_event(agent, healthy(5, 2, 3, 29500, UP)))
    assert get_worker_info(PATIENCE_S).rank == 2
    timer.join()


def test_changes_are_reported_once(agent: FileChannel) -> None:
    send_event(agent, healthy(1, 0, 2, 29500))
    assert wait_for_worker_event(0) is None
    send_event(agent, paused(0, 2, 1, DOWN))
    eventually(world_changed)
    assert get_worker_event().worker_state is WorkerState.PAUSED
    assert not world_changed()
    assert wait_for_worker_event(0.05) is None
    timer = later(lambda: send_event(agent, healthy(2, 0, 1, 29500, DOWN)))
    event = wait_for_worker_event(PATIENCE_S)
    timer.join()
    assert event is not None
    assert event.worker_info.round == 2
    assert not world_changed()


def test_an_ack_is_for_what_the_worker_was_sent_not_for_what_came_since(agent: FileChannel) -> None:
    send_event(agent, healthy(1, 0, 2, 29500))
    info = get_worker_info()
    send_event(agent, paused(0, 2, 1, DOWN))
    send_event(agent, healthy(2, 0, 1, 29500, DOWN))
    eventually(world_changed)
    ack_worker_event()
    info.get_pg_parameters()
    eventually(lambda: get_worker_event().worker_info.round == 2)
    ack_worker_event()
    assert said(agent, 4)[1:] == [WorkerAck(1), WorkerAck(1), WorkerAck(2)]


def test_garbage_between_events_is_ignored(
    agent: FileChannel, caplog: pytest.LogCaptureFixture
) -> None:
    agent.send({"type": "lunch"})
    send_event(agent, healthy(1, 0, 2, 29500))
    assert get_worker_info().round == 1
    agent.send({"type": "event", "timestamp": "now"})
    agent.send(
        healthy(3, 0, 2, 29500).to_message() | {"worker_info": {"rank": True, "world_size": 1}}
    )
    send_event(agent, healthy(2, 0, 2, 29500))
    event = wait_for_worker_event(PATIENCE_S)
    assert event is not None
    assert event.worker_info.round == 2
    assert caplog.text.count("ignoring a message of the agent") == 3


def test_a_worker_whose_agent_is_gone_gets_an_error(agent: FileChannel) -> None:
    send_event(agent, paused(0, 2))
    get_worker_event()
    timer = later(agent.close)
    with pytest.raises(ChannelClosed, match="removed"):
        get_worker_info(PATIENCE_S)
    timer.join()
    assert world_changed(), "so that a loop that looks in every step ends"
    with pytest.raises(ChannelClosed):
        get_worker_event()
    with pytest.raises(ChannelClosed):
        wait_for_worker_event(PATIENCE_S)


@pytest.mark.parametrize("wait", [get_worker_info, wait_for_worker_event, init_world])
def test_no_wait_for_a_world_outlasts_the_news_that_this_worker_is_ended(
    agent: FileChannel, wait: Callable[[], object]
) -> None:
    send_event(agent, paused(0, 2))
    get_worker_event()
    timer = later(lambda: agent.send(EndNotice("worker 1 failed").to_message()))
    with pytest.raises(WorkerEnding, match="worker 1 failed"):
        wait()
    timer.join()
    with pytest.raises(WorkerEnding):
        wait()


def test_a_worker_that_is_ended_may_finish_its_step(agent: FileChannel) -> None:
    send_event(agent, healthy(1, 0, 1, 29500))
    assert get_worker_info().round == 1
    agent.send(EndNotice("preempted").to_message())
    with pytest.raises(WorkerEnding):
        wait_for_worker_event(PATIENCE_S)
    assert not world_changed()
    assert get_worker_event().worker_info.round == 1
    with pytest.raises(WorkerEnding):
        get_worker_info()


def test_a_world_is_not_formed_any_more_by_a_worker_that_is_ended(agent: FileChannel) -> None:
    send_event(agent, healthy(1, 0, 2, 1))  # nobody is there
    info = get_worker_info()
    timer = later(lambda: agent.send(EndNotice("preempted").to_message()))
    with pytest.raises(WorldSuperseded, match="is ending it: preempted"):
        dist.init_process_group("gloo", **info.get_pg_parameters())
    timer.join()


def test_a_channel_that_is_gone_before_the_first_call_is_reported(agent: FileChannel) -> None:
    agent.close()
    with pytest.raises(ChannelClosed, match="there is no channel"):
        get_worker_info()


@pytest.mark.parametrize("transport", [QueueChannel, SocketChannel])
def test_another_transport(transport: type[QueueChannel] | type[SocketChannel]) -> None:
    agent, worker = transport.pair()
    send_event(agent, paused(0, 2))
    runtime.use_channel(worker)
    assert get_worker_event().worker_state is WorkerState.PAUSED
    timer = later(lambda: send_event(agent, healthy(1, 1, 2, 29500)))
    assert get_worker_info(PATIENCE_S).rank == 1
    timer.join()
    ack_worker_event()
    assert said(agent, 2)[1:] == [WorkerAck(1)]
    agent.close()
    eventually(world_changed)


def test_a_callback_is_called_for_every_event_that_comes(agent: FileChannel) -> None:
    send_event(agent, healthy(1, 0, 2, 29500))
    found: list[WorkerEvent] = []
    on_worker_event(lambda _: 1 / 0)
    on_worker_event(found.append)
    events = [
        send_event(agent, paused(0, 2, 1, DOWN)),
        send_event(agent, healthy(2, 0, 1, 29500, DOWN)),
    ]
    eventually(lambda: found == events)


def test_a_callback_has_run_before_its_event_is_reported(agent: FileChannel) -> None:
    send_event(agent, healthy(1, 0, 2, 29500))
    seen: list[int] = []
    on_worker_event(lambda _: time.sleep(0.1))
    on_worker_event(lambda _: seen.append(get_worker_info().round))
    send_event(agent, healthy(2, 0, 1, 29500, DOWN))
    eventually(lambda: get_worker_info().round == 2)
    assert seen == [1]


def test_a_worker_that_has_left_a_world_by_itself_waits_for_the_next(agent: FileChannel) -> None:
    send_event(agent, healthy(1, 0, 2, 29500))
    get_worker_info()
    leave_world()
    with pytest.raises(DeadlineExceeded):
        get_worker_info(0.05)
    send_event(agent, healthy(2, 0, 1, 29500, DOWN))
    assert get_worker_info(PATIENCE_S).round == 2
    assert said(agent, 2)[1:] == [WorkerLeft(1)]


def test_many_threads_learn_of_a_change(agent: FileChannel) -> None:
    send_event(agent, paused(0, 2))
    get_worker_event()
    found: list[WorkerInfo] = []
    threads = [
        threading.Thread(target=lambda: found.append(get_worker_info(PATIENCE_S))) for _ in range(5)
    ]
    for thread in threads:
        thread.start()
    event = send_event(agent, healthy(1, 0, 2, 29500))
    for thread in threads:
        thread.join()
    assert found == [event.worker_info] * 5


def test_asking_in_every_step_costs_nothing(agent: FileChannel) -> None:
    send_event(agent, healthy(1, 0, 2, 29500))
    world_changed()
    per_call_s = min(timeit.repeat(world_changed, number=10_000, repeat=20)) / 10_000
    assert per_call_s < 2e-6


@pytest.mark.processes
def test_a_forked_child_is_informed_and_keeps_silent(agent: FileChannel) -> None:
    send_event(agent, healthy(1, 0, 2, 29500))
    get_worker_info()
    child = os.fork()
    if child == 0:
        ack_worker_event()
        is_right = get_worker_info().round == 1 and not world_changed()
        os._exit(0 if is_right else 1)
    assert os.waitpid(child, 0)[1] == 0
    send_event(agent, healthy(2, 0, 2, 29500))
    event = wait_for_worker_event(PATIENCE_S)
    assert event is not None
    assert event.worker_info.round == 2
    assert said(agent, 1) == [WorkerStarted(os.getpid())]
    assert agent.receive(0) is None


# -- process groups --------------------------------------------------------------------------------


def test_parameters_of_a_replaced_world_are_refused_at_once(agent: FileChannel) -> None:
    send_event(agent, healthy(1, 0, 2, 29500))
    parameters = get_worker_info().get_pg_parameters()
    assert parameters["rank"] == 0
    assert parameters["world_size"] == 2
    send_event(agent, healthy(2, 0, 1, 29500))
    eventually(world_changed)
    with pytest.raises(WorldSuperseded, match="world 2 has replaced it"):
        dist.init_process_group("gloo", **parameters)


def test_the_variables_of_torchrun_follow_the_world(agent: FileChannel) -> None:
    send_event(agent, healthy(1, 1, 3, 29600))
    get_worker_info().get_pg_parameters()
    assert os.environ["RANK"] == "1"
    assert os.environ["WORLD_SIZE"] == "3"
    assert os.environ["MASTER_PORT"] == "29600"
    assert os.environ["ROLE_WORLD_SIZE"] == "3"
    assert "ROUND" not in os.environ


@pytest.mark.processes
def test_a_destroyed_group_makes_it_wait_for_the_next_world(agent: FileChannel) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    send_event(agent, healthy(1, 0, 1, store.port))
    info = get_worker_info()
    assert get_worker_info() == info, "asking twice is no reason to wait"
    parameters = info.get_pg_parameters()
    assert get_worker_info() == info
    dist.init_process_group("gloo", **parameters)
    assert get_worker_info() == info
    dist.destroy_process_group()
    assert get_worker_event().worker_info == info
    with pytest.raises(DeadlineExceeded):
        get_worker_info(0.05)
    with pytest.raises(WorldSuperseded, match="it had one"):
        dist.init_process_group("gloo", **parameters)
    send_event(agent, healthy(2, 0, 1, store.port))
    assert get_worker_info(PATIENCE_S).round == 2
    assert said(agent, 3)[1:] == [WorkerAck(1), WorkerLeft(1)]


@pytest.mark.processes
def test_who_leaves_a_world_when_it_knows_of_the_next_works_in_that(agent: FileChannel) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    send_event(agent, healthy(1, 0, 1, store.port))
    dist.init_process_group("gloo", **get_worker_info().get_pg_parameters())
    send_event(agent, healthy(2, 0, 1, store.port))
    event = wait_for_worker_event(PATIENCE_S)
    assert event is not None
    assert event.worker_info.round == 2
    leave_world()
    assert get_worker_info(PATIENCE_S).round == 2
    dist.init_process_group("gloo", **get_worker_info().get_pg_parameters())
    dist.destroy_process_group()
    assert said(agent, 3)[1:] == [WorkerAck(1), WorkerAck(2)]


# -- under plain torchrun --------------------------------------------------------------------------


def set_all(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name in (*TORCHRUN, "TORCHFT_WORKER_CHANNEL"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_under_torchrun_the_environment_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, TORCHRUN)
    info = get_worker_info()
    assert info == WorkerInfo(1, 0, 3, 2, 1, 4, "host", 29500)
    event = get_worker_event()
    assert event.worker_state is WorkerState.HEALTHY
    assert event.change_event is None
    assert abs(event.timestamp - time.time()) < 60
    assert not world_changed()
    ack_worker_event()
    assert wait_for_worker_event(0.01) is None
    assert info.get_pg_parameters() == {"init_method": "env://", "rank": 3, "world_size": 4}


@pytest.mark.processes
def test_a_group_is_formed_as_torchrun_would(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    set_all(monkeypatch, alone | {"MASTER_PORT": str(store.port)})
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    for _ in range(2):  # it leaves the first one itself
        assert init_world("gloo").world_size == 1
        assert dist.get_world_size() == 1
    leave_world()
    assert not dist.is_initialized()


def test_what_torch_itself_needs_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    set_all(monkeypatch, {name: TORCHRUN[name] for name in names})
    assert get_worker_info() == WorkerInfo(0, 3, 3, 1, 4, 4, "host", 29500)


def test_a_launcher_may_set_a_local_rank_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    set_all(monkeypatch, {name: TORCHRUN[name] for name in names})
    assert get_worker_info() == WorkerInfo(1, 3, 3, 2, 4, 4, "host", 29500)


@pytest.mark.parametrize("missing", ["RANK", "MASTER_PORT"])
def test_without_a_launcher_there_is_a_clear_error(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    set_all(monkeypatch, {name: value for name, value in TORCHRUN.items() if name != missing})
    with pytest.raises(ConfigError, match=f"{missing}=None cannot work.*start this program with"):
        world_changed()


def test_ranks_that_contradict_one_another_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, TORCHRUN | {"RANK": "4"})
    with pytest.raises(ConfigError, match="rank is 4, but world_size is 4"):
        get_worker_info()


# -- messages --------------------------------------------------------------------------------------


@pytest.mark.parametrize("event", [paused(0, 2), paused(1, 2, 7, DOWN), healthy(8, 1, 2, 1, UP)])
def test_an_event_survives_its_message(event: WorkerEvent) -> None:
    assert agent_message(event.to_message()) == event


def test_the_reason_for_an_end_survives_its_message_cut_to_its_limit() -> None:
    assert agent_message(EndNotice("x" * 2000).to_message()) == EndNotice("x" * 1024)


@pytest.mark.parametrize("message", [WorkerStarted(7), WorkerAck(3), WorkerLeft(2**53 - 1)])
def test_a_workers_message_survives(message: WorkerStarted | WorkerAck | WorkerLeft) -> None:
    assert worker_message(message.to_message()) == message


INFO = asdict(healthy(1, 0, 2, 29500).worker_info)
EVENT = healthy(1, 0, 2, 29500).to_message()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"type": "started"}, "has the type 'started'"),
        ({"timestamp": 1.5}, "timestamp is 1.5"),
        ({"worker_state": "ILL"}, "worker_state is 'ILL'"),
        ({"worker_state": []}, "worker_state is"),
        ({"change_event": "SIDEWAYS"}, "change_event is 'SIDEWAYS'"),
        ({"worker_info": None}, "has the worker_info None"),
        ({"worker_info": INFO | {"rank": 2}}, "rank is 2, but world_size is 2"),
        ({"worker_info": INFO | {"master_port": 65536}}, "master_port is 65536"),
        ({"worker_info": INFO | {"master_addr": "x" * 2000}}, "master_addr is no text"),
        ({"worker_info": INFO | {"round": -1}}, "round is -1"),
    ],
)
def test_an_event_that_cannot_be_is_refused(change: dict[str, object], reason: str) -> None:
    with pytest.raises(RequestRefused, match=reason):
        agent_message(EVENT | change)


@pytest.mark.parametrize("message", [{}, {"type": "ack", "round": "1"}, {"type": "event"}])
def test_what_no_worker_says_is_refused(message: dict[str, object]) -> None:
    with pytest.raises(RequestRefused):
        worker_message(message)


@pytest.mark.processes
def test_importing_it_is_cheap() -> None:
    script = (
        "import sys, torchft_svc.elastic.runtime\n"
        "print(sorted({'torch', 'numpy', 'grpc', 'asyncio'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == "[]"
