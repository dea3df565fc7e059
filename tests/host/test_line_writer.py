"""Tests that nobody who logs or prints waits for a reader, and what becomes of the lines."""

from __future__ import annotations

import contextlib
import io
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, TextIO

import pytest
from support import bounds
from support.running import environment, eventually
from support.stuck import StuckPipe, stuck_pipe

from torchft_svc.host.line_writer import (
    FLUSH_S,
    MAX_WAITING_LINES,
    LineStream,
    LineWriter,
    unblocked_output,
)
from torchft_svc.host.log_limit import LimitedLog

# A child that hangs is ended after so long.
CHILD_S = 10
# Far below anything that waits for a reader.
AT_ONCE_S = 0.5
# One line is with the thread, which cannot write it.
MAX_KEPT = MAX_WAITING_LINES + 1


@contextlib.contextmanager
def writer_to(pipe: StuckPipe, **options: Any) -> Iterator[LineWriter]:
    """The text of the pipe, which is read before the block is left."""
    with open(pipe.writing, "w", closefd=False) as stream:
        yield LineWriter(stream, **options)


def put_until(writer: LineWriter, num_lines: int) -> None:
    began_at = time.monotonic()
    for number in range(num_lines):
        writer.put_nowait(f"line {number}\n")
    bounds.check(f"{num_lines} lines", time.monotonic() - began_at, AT_ONCE_S)


def test_lines_that_nobody_reads_are_counted_and_the_others_keep_their_order() -> None:
    with stuck_pipe() as pipe, writer_to(pipe) as writer:
        writer.put_nowait("line 0\n")
        eventually(lambda: writer._waiting.empty(), what="the thread has the first line")
        put_until(writer, MAX_WAITING_LINES + 500)
        read = pipe.read("lost")
        writer.put_nowait("last\n")
        read += pipe.read("last\n")
        writer.close()
    lines = read.splitlines()
    assert lines[:MAX_KEPT] == ["line 0", *(f"line {n}" for n in range(MAX_WAITING_LINES))]
    report = "torchft_svc: lost 500 lines of output, which nobody read in time"
    assert lines[MAX_KEPT:] == [report, "last"]


def test_the_number_of_lost_lines_stands_where_they_are_missing() -> None:
    with stuck_pipe() as pipe, writer_to(pipe) as writer:
        put_until(writer, MAX_KEPT + 500)
        text = pipe.read("line 0\n")
        eventually(writer._has_room)
        writer.put_nowait("later\n")
        if "later\n" not in text:
            text += pipe.read("later\n")
        lines = text.splitlines()
        writer.close()
    assert lines[-2].startswith("torchft_svc: lost ")


@pytest.mark.processes
def test_a_patient_writer_loses_nothing_while_somebody_reads() -> None:
    with stuck_pipe() as pipe, writer_to(pipe) as writer:
        stream = LineStream(writer, patience_s=60.0)
        put_until(writer, MAX_KEPT)
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(BaseException):
                pipe.read("the end")
            os._exit(0)
        for number in range(2 * MAX_WAITING_LINES):
            stream.write(f"{number}\n")
        stream.write("the end\n")
        assert os.waitpid(pid, 0)[1] == 0
        assert writer.flush()
        assert writer._num_lost == 0
        writer.close()


def test_a_reader_that_went_away_costs_lines_and_nothing_else(tmp_path: Any) -> None:
    """Another reader may come, as with a FIFO."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reading = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    with open(fifo, "w") as stream:
        writer = LineWriter(stream)
        os.close(reading)
        for number in range(3):
            writer.put_nowait(f"line {number}\n")
        assert writer.flush()
        with open(fifo) as again:
            writer.put_nowait("line 3\n")
            assert writer.flush()
            first, second = again.readline(), again.readline()
        writer.close()
    assert first.startswith("torchft_svc: lost 3 lines")
    assert second == "line 3\n"


def test_a_pipe_that_somebody_made_non_blocking_gets_every_line() -> None:
    with stuck_pipe() as pipe, writer_to(pipe) as writer:
        os.set_blocking(pipe.writing, False)
        put_until(writer, 3)
        assert pipe.read("line 2\n").splitlines() == ["line 0", "line 1", "line 2"]
        writer.close()


def closed_file() -> TextIO:
    stream = open(os.devnull, "w")  # noqa: SIM115
    stream.close()
    return stream


@pytest.mark.parametrize("stream", [None, closed_file()])
def test_a_stream_that_is_closed_is_no_error(stream: TextIO | None) -> None:
    writer = LineWriter(stream)
    put_until(writer, 3)
    assert writer.flush()
    writer.close()
    writer.put_nowait("later\n")


def test_a_programs_own_stream_gets_the_lines() -> None:
    stream = io.StringIO()
    writer = LineWriter(stream)
    put_until(writer, 2)
    writer.close()
    assert stream.getvalue() == "line 0\nline 1\n"


@pytest.mark.processes
@pytest.mark.parametrize("is_stuck", [True, False])
def test_a_forked_child_writes_its_own_lines_and_never_waits(is_stuck: bool) -> None:
    """A fork inherits neither the thread nor the lines that wait in its parent."""
    with stuck_pipe() as pipe, writer_to(pipe) as writer:
        put_until(writer, 10)
        if not is_stuck:
            pipe.read("line 9\n")
        pid = os.fork()
        if pid == 0:
            writer.put_nowait("of the child\n")
            writer.flush()
            os._exit(0)
        began_at = time.monotonic()
        assert os.waitpid(pid, 0)[1] == 0
        bounds.check("the child", time.monotonic() - began_at, AT_ONCE_S)
        writer.put_nowait("after\n")
        lines = pipe.read("after\n").splitlines()
        writer.close()
    mine = [f"line {number}" for number in range(10)] if is_stuck else ["of the child"]
    assert lines == [*mine, "after"]


@pytest.mark.processes
def test_a_child_that_is_forked_while_a_thread_prints_can_print() -> None:
    """A fork begins its own line, not in the middle of the parent's."""
    with stuck_pipe() as pipe, writer_to(pipe) as writer:
        pipe.skip_filling()
        stream = LineStream(writer)
        stream.write("unfinished")
        prints, may_end = threading.Event(), threading.Event()

        def print_slowly() -> None:
            with stream._lock:
                prints.set()
                may_end.wait(CHILD_S)

        thread = threading.Thread(target=print_slowly)
        thread.start()
        assert prints.wait(CHILD_S)
        pid = os.fork()
        if pid == 0:
            signal.alarm(CHILD_S)
            stream.write("of the child\n")
            os._exit(0)
        status = os.waitpid(pid, 0)[1]
        may_end.set()
        thread.join(CHILD_S)
        assert status == 0, "it waits for a thread that it does not have"
        stream.write(" line\n")
        assert pipe.read(" line\n") == "of the child\nunfinished line\n"
        writer.close()


def log_in_child(descriptor: int) -> None:
    stream = open(descriptor, "w")  # noqa: SIM115 - the handler keeps it
    handler = LimitedLog(LineWriter(stream))
    log = logging.getLogger("torchft_svc.child")
    log.addHandler(handler)
    for number in range(100):
        log.error(f"number {number}")


@pytest.mark.processes
def test_a_child_of_multiprocessing_writes_all_lines_before_it_ends() -> None:
    reading, writing = os.pipe()
    child = multiprocessing.get_context("fork").Process(target=log_in_child, args=(writing,))
    child.start()
    child.join()
    os.close(writing)
    with open(reading) as read:
        assert read.read().splitlines() == [f"number {number}" for number in range(100)]


def print_through_several(descriptor: int) -> None:
    for _ in range(6):
        writer = LineWriter(open(descriptor, "w", closefd=False))  # noqa: SIM115 - it keeps it
        writer.put_nowait("line\n")


@pytest.mark.processes
def test_a_child_of_multiprocessing_waits_once_for_all_its_readers() -> None:
    with stuck_pipe() as pipe:
        child = multiprocessing.get_context("fork").Process(
            target=print_through_several, args=(pipe.writing,)
        )
        began_at = time.monotonic()
        child.start()
        child.join()
        bounds.check("an end with six readers", time.monotonic() - began_at, FLUSH_S + 1.5)


ENDING = """
import logging, sys
from torchft_svc.client.runtime.trainer_log import speak_on_stderr
from torchft_svc.host.log_format import Speaker
speak_on_stderr("info", "text", Speaker("a"))
for number in range(5):
    logging.getLogger("torchft_svc.x").info("number %d", number)
{end}
"""
# Of an interpreter, without torch.
EXIT_S = 3.0


@pytest.mark.processes
@pytest.mark.parametrize("end", ["", "raise SystemExit(0)"])
def test_a_program_ends_in_time_though_nobody_reads(end: str) -> None:
    with stuck_pipe() as pipe:
        program = [sys.executable, "-c", ENDING.format(end=end)]
        process = subprocess.Popen(
            program, stderr=pipe.writing, stdout=subprocess.PIPE, env=environment()
        )
        began_at = time.monotonic()
        assert process.wait(30) == 0
        bounds.check("the program", time.monotonic() - began_at, EXIT_S + FLUSH_S)
        process.stdout.close()  # type: ignore[union-attr]


@pytest.mark.processes
def test_a_program_that_ends_has_written_every_line() -> None:
    program = [sys.executable, "-c", ENDING.format(end="")]
    done = subprocess.run(program, stderr=subprocess.PIPE, env=environment(), check=True)
    lines = done.stderr.decode().splitlines()
    assert [line.rpartition("] ")[2] for line in lines] == [f"number {n}" for n in range(5)]


def test_what_cannot_be_formatted_is_logged_without_waiting() -> None:
    with stuck_pipe() as pipe, writer_to(pipe) as writer:
        handler = LimitedLog(writer)
        handler.handle(logging.LogRecord("x", logging.ERROR, "", 0, "%d of %s", ("two",), None))
        text = pipe.read("TypeError")
        handler.close()
    assert "cannot log x: '%d of %s'" in text


def test_prints_and_tracebacks_go_the_same_way(capfd: pytest.CaptureFixture[str]) -> None:
    with unblocked_output():
        print("a", "b")
        print("part", end="", flush=True)
        print("wrong", file=sys.stderr)
    read = capfd.readouterr()
    assert (read.out, read.err) == ("a b\npart", "wrong\n")
