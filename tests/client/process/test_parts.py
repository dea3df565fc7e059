"""Tests the client's small parts: the background thread, futures with deadlines, the read gate."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch

from torchft_svc.client.process.background import BackgroundThread, Task
from torchft_svc.client.process.deadlines import Timer, guard_future
from torchft_svc.client.step.state import ReadGate, StateRegistry
from torchft_svc.errors import CheckpointError, ConfigError, DeadlineExceeded

DEADLINE_S = 10.0


def submitted(thread: BackgroundThread, action: Callable[[], None]) -> Task:
    task = Task(action)
    thread.submit(task)
    return task


def test_a_task_is_run_or_abandoned_and_not_both() -> None:
    seen: list[str] = []
    run, abandoned = Task(lambda: seen.append("run")), Task(lambda: seen.append("abandoned"))
    run.run()
    assert not run.abandon(RuntimeError("too late"))
    assert run.error is None
    assert abandoned.abandon(RuntimeError("in time"))
    abandoned.run()
    assert seen == ["run"]
    assert abandoned.done


def test_tasks_run_in_order_on_a_thread_with_a_name() -> None:
    thread = BackgroundThread("torchft-test")
    seen: list[str] = []
    tasks = [
        submitted(thread, lambda: seen.append(threading.current_thread().name)),
        submitted(thread, lambda: seen.append("second")),
    ]
    assert all(task.wait(DEADLINE_S) for task in tasks)
    assert seen == ["torchft-test", "second"]
    assert thread.close(DEADLINE_S)


def test_an_error_is_kept_for_who_waits() -> None:
    thread = BackgroundThread("torchft-test")
    error = ValueError("on the thread")

    def fails() -> None:
        raise error

    failed, good = submitted(thread, fails), submitted(thread, lambda: None)
    assert failed.wait(DEADLINE_S)
    assert good.wait(DEADLINE_S)
    assert (failed.error, good.error) == (error, None)
    assert thread.close(DEADLINE_S)


def test_a_closed_thread_abandons_what_comes_late() -> None:
    thread = BackgroundThread("torchft-test")
    assert thread.close(DEADLINE_S)
    assert thread.close(DEADLINE_S)
    late = submitted(thread, lambda: None)
    assert late.done
    assert "shut down" in str(late.error)


def test_closing_does_not_wait_for_ever() -> None:
    thread = BackgroundThread("torchft-test")
    may_end = threading.Event()
    submitted(thread, lambda: may_end.wait(DEADLINE_S) and None)
    assert not thread.close(0.01)
    may_end.set()
    assert thread.close(DEADLINE_S)


@pytest.fixture
def timer():  # type: ignore[no-untyped-def]
    timer = Timer("torchft-test-timer")
    yield timer
    timer.close(DEADLINE_S)


def test_calls_come_in_the_order_of_their_times(timer: Timer) -> None:
    calls: list[int] = []
    done = threading.Event()
    all_told = threading.Event()
    now = time.monotonic()
    timer.call_at(now, lambda: all_told.wait(DEADLINE_S) and None)
    timer.call_at(now + 0.05, lambda: (calls.append(2), done.set()))
    timer.call_at(now + 0.01, lambda: calls.append(1))
    timer.cancel(timer.call_at(now + 0.02, lambda: calls.append(9)))
    all_told.set()
    assert done.wait(DEADLINE_S)
    assert calls == [1, 2]


def test_a_time_that_never_comes_holds_up_no_other(timer: Timer) -> None:
    """Waiting for it would be more than the system can."""
    timer.call_at(time.monotonic() + 1e13, lambda: None)
    soon = threading.Event()
    timer.call_at(time.monotonic() + 0.01, soon.set)
    assert soon.wait(10)


def test_a_future_that_ends_too_late_changes_nothing(timer: Timer) -> None:
    errors: list[Exception] = []
    source: torch.futures.Future[int] = torch.futures.Future()
    guarded = guard_future(source, -1, 0.01, errors.append, timer)
    assert guarded.wait() == -1
    source.set_result(3)
    assert guarded.value() == -1
    assert isinstance(errors[0], DeadlineExceeded)
    assert len(errors) == 1


def test_i5_a_future_does_not_outlive_who_keeps_its_deadline() -> None:
    timer = Timer("torchft-test-timer")
    errors: list[Exception] = []
    source: torch.futures.Future[int] = torch.futures.Future()
    before = guard_future(source, -1, 60.0, errors.append, timer)
    timer.close(DEADLINE_S)
    after = guard_future(torch.futures.Future(), -2, 60.0, errors.append, timer)
    assert (before.done(), after.done()) == (True, True)
    assert (before.value(), after.value()) == (-1, -2)
    source.set_result(3)
    assert (before.value(), errors) == (-1, [])


def test_a_future_that_ends_in_time_needs_no_timer(timer: Timer) -> None:
    errors: list[Exception] = []
    source: torch.futures.Future[int] = torch.futures.Future()
    guarded = guard_future(source, -1, 60.0, errors.append, timer)
    source.set_result(3)
    assert guarded.wait() == 3
    assert (errors, timer._due) == ([], [])


def test_a_shut_gate_keeps_readers_out_until_it_is_opened() -> None:
    gate = ReadGate()
    gate.shut(DEADLINE_S)
    with pytest.raises(DeadlineExceeded, match="being changed"), gate.reading(0.01):
        pass
    entered = threading.Event()

    def reads() -> None:
        with gate.reading(DEADLINE_S):
            entered.set()

    reader = threading.Thread(target=reads)
    reader.start()
    assert not entered.is_set()
    gate.open()
    reader.join(DEADLINE_S)
    assert entered.is_set()


def test_shutting_waits_for_readers_and_gives_up_in_time() -> None:
    gate = ReadGate()
    with gate.reading(0.0):
        with pytest.raises(DeadlineExceeded, match="waiting for readers"):
            gate.shut(0.01)
        with gate.reading(0.0):  # the gate is as it was
            pass
    gate.shut(0.0)


def test_the_registry_collects_and_loads_by_key() -> None:
    registry = StateRegistry()
    loaded: dict[str, object] = {}
    registry.register("one", lambda state: loaded.update(one=state), lambda: 1)
    registry.register("two", lambda state: loaded.update(two=state), lambda: 2)
    state = registry.collect({"step": 3, "batches_committed": 6}, 0.0)
    assert state == {
        "user": {"one": 1, "two": 2},
        "torchft": {"step": 3, "batches_committed": 6},
    }
    assert registry.check(state, "there") == {"step": 3, "batches_committed": 6}
    registry.load(state)
    assert loaded == {"one": 1, "two": 2}


@pytest.mark.parametrize("state", [None, [], {"user": {}}, {"user": {"x": 1}, "torchft": {}}])
def test_a_foreign_state_is_refused(state: object) -> None:
    registry = StateRegistry()
    registry.register("one", print, dict)
    with pytest.raises(CheckpointError, match="from there"):
        registry.check(state, "there")


def test_bad_pieces_are_refused() -> None:
    registry = StateRegistry()
    registry.register("one", print, dict)
    with pytest.raises(ConfigError, match=r"key='one'.*another piece"):
        registry.register("one", print, dict)
    with pytest.raises(ConfigError, match="key=''"):
        registry.register("", print, dict)
    with pytest.raises(ConfigError, match="state_dict=3"):
        registry.register("two", print, 3)  # type: ignore[arg-type]
