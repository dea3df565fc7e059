"""Tests the background thread: each task is run once, or abandoned."""

from __future__ import annotations

import threading
from collections.abc import Callable

from torchft_svc.client.process.background import BackgroundThread, Task

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
