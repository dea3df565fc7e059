"""The processes of a node's workers: each is started, watched and ended on its own.

torch's own process context ends all of them when one fails; under a soft policy that is a decision
of the agent. Commands and functions, log files, their tails on the console and error files are as
torchrun's users know them.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import multiprocessing.connection
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TextIO, cast

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.multiprocessing.api import get_std_cm
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure, record
from torch.distributed.elastic.multiprocessing.redirects import redirect_stderr, redirect_stdout
from torch.distributed.elastic.multiprocessing.tail_log import TailLog
from torch.distributed.elastic.utils.api import macros

from torchft_svc import env
from torchft_svc.elastic.warm_start import WarmStart
from torchft_svc.errors import ConfigError
from torchft_svc.host import process_end
from torchft_svc.host.line_writer import MAX_PART, READER_PATIENCE_S, LineStream, LineWriter
from torchft_svc.host.process_end import POLL_S
from torchft_svc.host.worker_process import KILL_S, SpawnedProcess, WorkerProcess

log = logging.getLogger(__name__)

Entrypoint = Callable[..., Any] | str

_TORCH_PREFIX = "torchelastic_"
_WRAPPER = "-I", "-S", process_end.__file__


def check_program(command: str) -> None:
    """Raise `ConfigError` if there is no command ``command``."""
    if shutil.which(command) is None:
        raise ConfigError("entrypoint", command, "there is no such program that can be run")


def tied(entrypoint: Entrypoint, args: tuple[Any, ...]) -> tuple[Entrypoint, tuple[Any, ...]]:
    """The entrypoint and its arguments, so that the kernel ends it when this process ends.

    Raises:
        ConfigError: there is no such command.
    """
    if not isinstance(entrypoint, str):
        return TiedFunction(entrypoint, os.getpid()), args
    check_program(entrypoint)
    if not sys.executable:
        return entrypoint, args
    return sys.executable, (*_WRAPPER, str(os.getpid()), entrypoint, *args)


def untied(command: tuple[Any, ...]) -> tuple[Any, ...]:
    """The command with its arguments that was tied by `tied`, or ``command`` itself."""
    return command[len(_WRAPPER) + 2 :] if command[1 : len(_WRAPPER) + 1] == _WRAPPER else command


def end_alone(
    processes: Sequence[subprocess.Popen[Any]], number: signal.Signals, timeout_s: float
) -> bool:
    """Signal processes that lead sessions; when one has ended, kill the rest of its session.

    Returns whether all have ended within ``timeout_s``.
    """
    running = [process for process in processes if process.poll() is None]
    for process in running:
        log.warning("sending %s to worker process %d", number.name, process.pid)
        process.send_signal(number)
    deadline = time.monotonic() + timeout_s
    for process in running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
    return all(process.poll() is not None for process in running)


class TiedFunction:
    """Calls ``function`` in a process that ends with its agent; has the function's name."""

    def __init__(self, function: Callable[..., Any], agent_pid: int) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._agent_pid = agent_pid

    def __call__(self, *args: Any) -> Any:
        process_end.end_with(self._agent_pid)
        return self._function(*args)


@dataclass(frozen=True)
class WorkerEnd:
    """The end of a worker; ``failure`` is None if it succeeded; ``value``: of its function."""

    local_rank: int
    pid: int
    exit_code: int
    failure: ProcessFailure | None = None
    value: Any = None


class LocalWorkers:
    """Starts and watches the workers of ``spec``; all calls come from one thread.

    Args:
        spec: what they run.
        logs_specs: where their streams and errors go.
        start_method: multiprocessing's, for functions.
        line_prefix: torchrun's template for lines on the console (None: ``[role0]:``).
        warm: starts commands, whenever it can.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        logs_specs: LogsSpecs,
        start_method: str = "spawn",
        line_prefix: Callable[[int], str] | None = None,
        warm: WarmStart | None = None,
    ) -> None:
        self._spec = spec
        self._warm = warm
        self._logs_specs = logs_specs
        self._start_method = start_method
        self._line_prefix = line_prefix
        self._running: dict[int, WorkerProcess] = {}
        self._logs: dict[int, _Tails] = {}
        self._error_files: dict[int, str] = {}
        self._is_ending = False  # whether those that run were signalled

    @property
    def pids(self) -> dict[int, int]:
        """Process ids of the workers that `reap` has not returned yet, by local rank."""
        return {rank: process.pid for rank, process in self._running.items()}

    @property
    def descriptors(self) -> list[int]:
        """Readable when `reap` has something to do. Empty: call it every `POLL_S` seconds."""
        return [each for process in self._running.values() for each in process.descriptors]

    def stopped(self) -> dict[int, int]:
        """Process ids of the workers that are stopped (SIGSTOP), by local rank.

        Those that a debugger has stopped are left out; without /proc, all are.
        """
        return {rank: pid for rank, pid in self.pids.items() if _is_stopped(pid)}

    def kill(self, local_rank: int) -> None:
        """Kill one worker, and what it has started; `reap` returns its end."""
        self._running[local_rank].send_signal(signal.SIGKILL)

    def start(
        self, environments: dict[int, dict[str, str]], local_ranks: Collection[int] | None = None
    ) -> None:
        """Start the workers of ``local_ranks`` (default: all), which do not run.

        ``environments`` are those of all local ranks. An attempt's directory of logs is made anew,
        so another attempt number (``TORCHELASTIC_RESTART_COUNT``) keeps the old one.
        """
        destination = self._logs_specs.reify(environments)
        chosen = sorted(environments if local_ranks is None else local_ranks)
        assert not self._running.keys() & set(chosen)
        self._is_ending = False
        for rank in chosen:
            self._stop_tails(rank)
            self._error_files[rank] = destination.error_files.get(rank, "")
            self._running[rank] = self._start_worker(rank, environments[rank], destination)
            self._logs[rank] = _Tails(self._spec, rank, destination, self._line_prefix)

    def reap(self) -> list[WorkerEnd]:
        """Return the ends of the workers that have ended since the last call."""
        ended = []
        for rank, process in list(self._running.items()):
            exit_code = process.poll()
            if exit_code is None:
                continue
            del self._running[rank]
            process.close(kill_rest=exit_code != 0 or self._is_ending)
            failure = None
            if exit_code != 0:
                file = self._error_files[rank]
                failure = ProcessFailure(rank, process.pid, exit_code, file)
            value = process.value if isinstance(process, _FunctionProcess) else None
            ended.append(WorkerEnd(rank, process.pid, exit_code, failure, value))
        return ended

    def send_signal(self, number: signal.Signals) -> None:
        """Signal all workers that run; see `SessionProcess` for what they have started.

        Workers that are stopped continue: until then they would not notice the signal.
        """
        for process in self._running.values():
            log.warning("sending %s to worker process %d", number.name, process.pid)
            process.send_signal(number)
            process.send_signal(signal.SIGCONT)
        self._is_ending = self._is_ending or bool(self._running)

    def abandon(self) -> None:
        """Forget the workers that even SIGKILL has not ended: they hang in the kernel."""
        for process in self._running.values():
            log.error("worker process %d has not ended after SIGKILL: left alone", process.pid)
        self._running.clear()

    def close(self) -> None:
        """Kill what runs, and write what the tails have not written yet. May be called twice.

        A temporary directory of logs is removed, unless something was written there.
        """
        self.send_signal(signal.SIGKILL)
        deadline = time.monotonic() + KILL_S
        self.reap()
        while self._running and (left_s := deadline - time.monotonic()) > 0:
            watched = self.descriptors
            multiprocessing.connection.wait(watched, left_s if watched else POLL_S)
            self.reap()
        self.abandon()
        if self._warm is not None:
            self._warm.close()
        for rank in list(self._logs):
            self._stop_tails(rank)
        _remove_unused(Path(self._logs_specs.root_log_dir))

    def _start_worker(
        self, rank: int, environment: dict[str, str], logs: LogsDest
    ) -> WorkerProcess:
        entrypoint = self._spec.entrypoint
        args = tuple(macros.substitute(list(self._spec.args), str(rank)))
        streams = logs.stdouts.get(rank, ""), logs.stderrs.get(rank, "")
        if isinstance(entrypoint, str):
            command = tuple(str(word) for word in (entrypoint, *args))
            return self._start_command(rank, command, env.for_child(environment), streams)
        assert entrypoint is not None
        numa_options = getattr(self._spec, "numa_options", None)
        task = _Task(entrypoint, args, environment, streams, rank, numa_options)
        return _FunctionProcess(multiprocessing.get_context(self._start_method), task)

    def _start_command(
        self,
        rank: int,
        words: tuple[str, ...],
        environment: dict[str, str],
        streams: tuple[str, str],
    ) -> WorkerProcess:
        """Fork the command warm, if that is possible now; else spawn it."""
        program = untied(words)
        numa_options = getattr(self._spec, "numa_options", None)
        with contextlib.ExitStack() as files:
            out, err = (files.enter_context(open(path, "w")) if path else None for path in streams)
            if self._warm is not None and numa_options is None:
                descriptors = 0, out.fileno() if out else 1, err.fileno() if err else 2
                forked = self._warm.fork(program, environment, descriptors)
                if forked is not None:
                    log.info("worker %d is a warm start: process %d", rank, forked.pid)
                    return forked
            if numa_options is not None:
                words = _bound_command(words, rank, numa_options)
            is_python = program[0] == sys.executable
            return SpawnedProcess(words, environment, out, err, is_python=is_python)

    def _stop_tails(self, rank: int) -> None:
        if (tails := self._logs.pop(rank, None)) is not None:
            tails.stop()


class _FunctionProcess(WorkerProcess):
    """A process of multiprocessing, which sends back what the function returns: ``value``."""

    def __init__(self, context: Any, task: _Task) -> None:
        self._values, values = context.Pipe()
        self._process = context.Process(target=_run, args=(task, values), daemon=False)
        self._process.start()
        values.close()
        self._is_read = False
        self.value: Any = None
        super().__init__(self._process.pid)

    @property
    def descriptors(self) -> list[int]:
        return [*super().descriptors, *([] if self._is_read else [self._values.fileno()])]

    def poll(self) -> int | None:
        code: int | None = self._process.exitcode
        # A long value has to be read before the process can end.
        if not self._is_read and self._values.poll():
            self._is_read = True
            with contextlib.suppress(EOFError, ConnectionError):
                self.value = self._values.recv()
                self._values.send(None)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def close(self, *, kill_rest: bool) -> None:
        super().close(kill_rest=kill_rest)
        self._values.close()
        self._process.close()


@dataclass(frozen=True)
class _Task:
    """The work of a function's process."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    environment: Mapping[str, str]
    streams: tuple[str, str]
    local_rank: int
    numa_options: Any = field(default=None)

    def run(self) -> Any:
        function = self.function
        if self.numa_options is not None:
            function = _bound(function, self.local_rank, self.numa_options)
        return record(function)(*self.args)


def _run(task: _Task, values: Connection) -> None:
    """The main function of a function's process."""
    for number in signal.valid_signals():  # a fork has those of its agent, which only note them
        handler = signal.getsignal(number)
        if callable(handler) and handler is not signal.default_int_handler:
            is_interrupt = number is signal.SIGINT
            signal.signal(number, signal.default_int_handler if is_interrupt else signal.SIG_DFL)
    env.update(task.environment)
    out, err = task.streams
    with get_std_cm(out, redirect_stdout), get_std_cm(err, redirect_stderr):
        try:
            value = task.run()
        except Exception:  # noqa: BLE001 - the agent sees the exit code
            traceback.print_exc()  # while the stream is redirected
            sys.exit(1)
    values.send(value)
    with contextlib.suppress(EOFError, ConnectionError):
        values.recv()  # a tensor is fetched from this process, which must live until then


class _Tails:
    """Copies a worker's redirected streams to the console, and its chosen lines to a file.

    A console that nobody reads does not stop the agent; then lines of the copy are lost.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        rank: int,
        logs: LogsDest,
        line_prefix: Callable[[int], str] | None,
    ) -> None:
        header = f"[{spec.role}{rank}]:" if line_prefix is None else line_prefix(rank)
        self._tails: list[TailLog] = []
        self._ends: list[Callable[[], object]] = []
        for sources, console, filters, path in (
            (logs.tee_stdouts, sys.stdout, spec.duplicate_stdout_filters, logs.filtered_stdout),
            (logs.tee_stderrs, sys.stderr, spec.duplicate_stderr_filters, logs.filtered_stderr),
        ):
            source = {rank: sources[rank]} if rank in sources else {}
            if source:
                stream: Any = console
                if not isinstance(console, LineStream):
                    stream = LineStream(LineWriter(console), READER_PATIENCE_S)
                    self._ends.append(stream.writer.close)
                self._copy(spec.role, source, _WholeLines(stream, header))
            if filters and source:
                file = open(path, "a", errors="replace", buffering=1)  # noqa: SIM115 - by stop()
                self._ends.append(file.close)
                self._copy(spec.role, source, _WholeLines(file, header, tuple(filters)))
        for tail in self._tails:
            tail.start()

    def _copy(self, role: str, source: dict[int, str], lines: _WholeLines) -> None:
        self._tails.append(TailLog(role, source, cast(TextIO, lines), dict.fromkeys(source, "")))
        self._ends.insert(0, lines.end_line)  # before its stream is closed

    def stop(self) -> None:
        for tail in self._tails:
            tail.stop()
        for end in self._ends:
            end()


class _WholeLines:
    """What `TailLog` writes to: each line gets its header when all of it is there.

    `TailLog` reads what the worker has written so far, which may end inside of a line. A line that
    is too long is copied in parts.

    Args:
        words: only lines with one of them are copied (default: all).
    """

    def __init__(self, stream: Any, header: str, words: tuple[str, ...] = ("",)) -> None:
        self._stream, self._header, self._words = stream, header, words
        self._part = ""

    def write(self, text: str) -> None:
        self._part += text
        if len(self._part) > MAX_PART and not text.endswith("\n"):
            self._part += "\n"
        if self._part.endswith("\n"):
            line, self._part = self._part, ""
            if any(word in line for word in self._words):
                self._stream.write(self._header + line)

    def end_line(self) -> None:
        """Copy the last line of a worker that has not ended it."""
        if self._part:
            self.write("\n")


def _remove_unused(log_dir: Path) -> None:
    """torch makes one for each agent whose user names none."""
    if log_dir.parent == Path(tempfile.gettempdir()) and log_dir.name.startswith(_TORCH_PREFIX):
        for folder, _, _ in os.walk(log_dir, topdown=False):
            with contextlib.suppress(OSError):  # something is in it
                os.rmdir(folder)


# torch binds processes to processors near their GPU since 2.9, behind names that are not public.


def _bound(function: Callable[..., Any], local_rank: int, numa_options: Any) -> Any:
    from torch.numa import binding

    return binding._maybe_wrap_with_numa_binding(
        function, gpu_index=local_rank, numa_options=numa_options
    )


def _bound_command(words: tuple[str, ...], local_rank: int, numa_options: Any) -> tuple[str, ...]:
    from torch.numa import binding

    return binding._maybe_wrap_command_args_with_numa_binding(
        words, gpu_index=local_rank, numa_options=numa_options
    )


def _is_stopped(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] == "T"  # a debugger's is "t"
