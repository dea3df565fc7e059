"""Starts what the tests talk to: real services in real processes, and raw lines to them."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import grpc
import psutil
import pytest

from support.fork_server import SERVICES
from support.warm import Warm
from torchft_svc.coordination import Listeners, ManagerClient, ManagerServer
from torchft_svc.manager_server.early import SIDECAR
from torchft_svc.proto import torchft_pb2 as pb
from torchft_svc.rpc.channel import open_channel
from torchft_svc.rpc.codec import JOB_KEY
from torchft_svc.rpc.security import PLAIN, Security

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
# The programs that tests start as processes.
SCRIPTS = TESTS / "support" / "scripts"
START_S = 30.0
END_S = 20.0
CALL_S = 20.0
# Who waits asks this often, and more rarely the longer it lasts: asking must not slow down others.
_ASK_EVERY_S, _ASK_AT_LEAST_EVERY_S, _ASK_AFTER = 0.005, 0.05, 0.05
_LINES = {
    "lighthouse_server": "lighthouse listening on ",
    "manager_server": "manager listening on ",
}


def environment(**changes: str) -> dict[str, str]:
    """This process' environment, in which the package under test is found first."""
    return {**os.environ, "PYTHONPATH": str(ROOT), **changes}


def eventually(holds: Callable[[], Any], within_s: float = 20.0, what: str = "") -> Any:
    """Ask until ``holds`` returns something true, and return that."""
    began_at = time.monotonic()
    while True:
        found = holds()
        if found:
            return found
        waited_s = time.monotonic() - began_at
        assert waited_s < within_s, what or f"not within {within_s} s: {holds}"
        time.sleep(min(max(_ASK_EVERY_S, _ASK_AFTER * waited_s), _ASK_AT_LEAST_EVERY_S))


def freeze(pid: int) -> None:
    """Stop a process; when this returns, none of its threads runs any more, which the signal alone
    does not ensure."""
    process = psutil.Process(pid)
    process.send_signal(signal.SIGSTOP)
    threads = [psutil.Process(each.id) for each in process.threads()]
    eventually(lambda: all(each.status() == psutil.STATUS_STOPPED for each in threads))


def lives(process: psutil.Process) -> bool:
    """An orphan that has ended stays a zombie until the system's first process looks."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def start_with_process_id(pid: int, start: Callable[[], int]) -> None:
    """Call ``start`` until its process gets the id ``pid``, which an earlier one had."""
    for _ in range(50):
        try:
            Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid - 1))
        except OSError as error:
            pytest.skip(f"only root may choose a process id here: {error}")
        started = start()
        if started == pid:
            return
        os.kill(started, signal.SIGKILL)  # another process of this machine was faster
    pytest.skip(f"process id {pid} was taken by other processes of this machine")


@contextlib.contextmanager
def refusing() -> Iterator[str]:
    """An address that is taken, and where nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


@contextlib.contextmanager
def silent() -> Iterator[str]:
    """An address that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0), backlog=100) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def steady_address() -> str:
    """A free address below the ports that the system gives to connections: nobody takes it while
    the service that had it is restarted."""
    while True:
        port = random.randrange(15_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return f"127.0.0.1:{port}"


class Process:
    """A service in a process of its own; leaving the block kills it.

    It is forked from a process that has imported the services, which takes longer than the rest of
    most tests.
    """

    _is_forked = True

    def __init__(
        self, module: str, *flags: str, namespace: str | None = None, **variables: str
    ) -> None:
        """``namespace`` is the network namespace that it runs in (default: ours)."""
        self.module = module
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the block
        within = ("ip", "netns", "exec", namespace) if namespace else ()
        is_forked = self._is_forked and namespace is None
        how: Any = functools.partial(Warm, loaded=SERVICES) if is_forked else subprocess.Popen
        self._popen = how(
            [*within, sys.executable, "-m", f"torchft_svc.{module}", *flags],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._errors.fileno(),
            cwd=ROOT,
            env=environment(**variables),
        )
        self.pid = self._popen.pid
        line = self._first_line(time.monotonic() + START_S)
        said = _LINES[module]
        if not line.startswith(said):
            self._popen.kill()
            self._popen.wait()
            raise AssertionError(f"{module} said {line!r} and {self.errors()!r}")
        self.address = line.removeprefix(said).strip()
        self.port = int(self.address.rpartition(":")[2])

    def _first_line(self, deadline: float) -> str:
        assert self._popen.stdout is not None
        line = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._popen.stdout, selectors.EVENT_READ)
            while b"\n" not in line:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    break
                more = os.read(self._popen.stdout.fileno(), 4096)
                if not more:
                    break
                line += more
        return line.partition(b"\n")[0].decode()

    def send(self, number: int) -> None:
        self._popen.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and wait."""
        self._popen.kill()
        self._popen.wait(END_S)

    def end(self, number: int = signal.SIGTERM) -> tuple[int, float]:
        """Send a signal; the exit status, and after how many seconds it came."""
        began_at = time.monotonic()
        self.send(number)
        status: int = self._popen.wait(END_S)
        return status, time.monotonic() - began_at

    def wait(self, timeout_s: float = END_S) -> int:
        status: int = self._popen.wait(timeout_s)
        return status

    def is_running(self) -> bool:
        return self._popen.poll() is None

    def errors(self) -> str:
        """All that it has written to stderr."""
        self._errors.seek(0)
        return self._errors.read().decode()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        if self.is_running():
            self.send(signal.SIGCONT)
            self.kill()
        assert self._popen.stdout is not None
        self._popen.stdout.close()
        self._errors.close()


class FreshProcess(Process):
    """Started as users do: for tests of the start, or of what an environment changes before it."""

    _is_forked = False


def lighthouse_process(*flags: str, bind: str = "127.0.0.1:0", **variables: str) -> Process:
    # Groups of a test come when it lets them: the first ones need not wait for others.
    at_once = () if any("startup-wait" in flag for flag in flags) else ("--startup-wait-ms=0",)
    return Process("lighthouse_server", f"--bind={bind}", *at_once, *flags, **variables)


def manager_process(lighthouse: str, *flags: str, name: str = "group", **variables: str) -> Process:
    return Process(
        "manager_server",
        f"--lighthouse={lighthouse}",
        f"--replica-name={name}",
        "--store-address=127.0.0.1:1",
        "--bind=127.0.0.1:0",
        *flags,
        **variables,
    )


def start_manager(lighthouse: str, **changes: Any) -> ManagerServer:
    """A manager in this process, of a group of one worker; ``changes``: other arguments."""
    name = changes.get("replica_id", "group")
    arguments: dict[str, Any] = {
        "replica_id": name,
        "hostname": "127.0.0.1",
        "bind": "127.0.0.1:0",
        "store_addr": f"{name}.example:1",
        "world_size": 1,
        "heartbeat_interval": timedelta(milliseconds=100),
        "connect_timeout": timedelta(seconds=10),
        "quorum_retries": 0,
    }
    return ManagerServer(lighthouse_addr=lighthouse, **{**arguments, **changes})


def sidecar_of(name: str) -> psutil.Process:
    """The manager that a trainer in this process, of group ``name``, has started."""
    setting = json.dumps({"replica_name": name})[1:-1]
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # it ends now
            command = child.cmdline()
            if lives(child) and SIDECAR in command and setting in command[4]:
                found.append(child)
    (sidecar,) = found
    return sidecar


def command(module: str, *flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command of ours that ends by itself; forked, as a `Process` is."""
    words = [sys.executable, "-m", f"torchft_svc.{module}", *flags]
    return run_forked(words, SERVICES, START_S, **variables)


def run_forked(
    words: Sequence[str], loaded: str, timeout_s: float, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a program that ends by itself, forked from a process that has imported ``loaded``."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = Warm(
            words,
            stdout=output.fileno(),
            stderr=errors.fileno(),
            cwd=ROOT,
            env=environment(**variables),
            loaded=loaded,
        )
        try:
            status = process.wait(timeout_s)
        finally:
            process.kill()
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read().decode())
    return subprocess.CompletedProcess(words, status, *texts)


def run_fresh(
    command: Sequence[str], timeout_s: float, folder: Path = ROOT, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a command that ends by itself in processes of its own, as users do, without an input."""
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment(**variables),
        timeout=timeout_s,
        check=False,
    )


class Line:
    """A raw line to a service: calls are futures, so a test can cancel one or have many at once.

    They arrive in the order in which they are made: the connection is there before the first one,
    as gRPC sends those that have to wait for it in any order.
    """

    def __init__(self, address: str, security: Security = PLAIN) -> None:
        self.channel = open_channel(address, security)
        self._metadata = security.metadata
        nothing = self.channel.unary_unary("/torchft.Nobody/Nothing")
        nothing.future(b"", timeout=START_S, wait_for_ready=True).exception()

    def call(self, method: str, request: Any, timeout_s: float | None, job: str | None) -> Any:
        """The future of ``Service/Method``; its result is the parsed answer."""
        service, _, name = method.partition("/")
        described = pb.DESCRIPTOR.services_by_name[service].methods_by_name[name]
        invoke = self.channel.unary_unary(
            f"/torchft.{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=getattr(pb, described.output_type.name).FromString,
        )
        metadata = self._metadata if job is None else (*self._metadata, (JOB_KEY, job))
        return invoke.future(request, timeout=timeout_s, metadata=metadata)

    def quorum(
        self, replica_id: str, timeout_s: float = 10.0, job: str | None = None, **fields: Any
    ) -> Any:
        """Ask a lighthouse on behalf of ``replica_id``."""
        member = pb.QuorumMember(replica_id=replica_id, **fields)
        request = pb.LighthouseQuorumRequest(requester=member)
        return self.call("LighthouseService/Quorum", request, timeout_s, job)

    def beat(self, replica_id: str, job: str | None = None) -> Any:
        """A heartbeat, answered."""
        request = pb.LighthouseHeartbeatRequest(replica_id=replica_id)
        return self.call("LighthouseService/Heartbeat", request, CALL_S, job).result()

    def leave(self, replica_id: str, reason: str = "", job: str | None = None) -> None:
        request = pb.LighthouseLeaveRequest(replica_id=replica_id, reason=reason)
        self.call("LighthouseService/Leave", request, CALL_S, job).result()

    def askers(self, job: str = "default") -> set[str]:
        """The groups whose question waits at a lighthouse, also those whose name is taken."""
        request = pb.LighthouseStatusRequest()
        jobs = self.call("LighthouseService/Status", request, CALL_S, None).result().jobs
        groups = [group for each in jobs if each.job == job for group in each.groups]
        return {group.replica_id for group in groups if group.asking}

    def await_askers(self, *replica_ids: str, job: str = "default") -> None:
        """Return when these groups ask, and no others: two calls may overtake each other."""
        wanted = set(replica_ids)
        what = f"not within {CALL_S} s: a lighthouse at which {wanted} ask"
        eventually(lambda: self.askers(job) == wanted, CALL_S, what)

    def ask_manager(self, timeout_s: float = 10.0, **fields: Any) -> Any:
        """Ask a manager as one of its workers."""
        request = pb.ManagerQuorumRequest(**fields)
        return self.call("ManagerService/Quorum", request, timeout_s, None)

    def vote(self, timeout_s: float = 10.0, **fields: Any) -> Any:
        request = pb.ShouldCommitRequest(**fields)
        return self.call("ManagerService/ShouldCommit", request, timeout_s, None)

    def flush(self) -> None:
        """Return when a manager has received all that this line has asked before."""
        request = pb.CheckpointAddressRequest(rank=0)
        self.call("ManagerService/CheckpointAddress", request, CALL_S, None).exception()

    def close(self) -> None:
        self.channel.close()


@contextlib.contextmanager
def line_to(address: str, security: Security = PLAIN) -> Iterator[Line]:
    line = Line(address, security)
    try:
        yield line
    finally:
        line.close()


@dataclass(frozen=True, kw_only=True)
class _Welcomed(Listeners):
    """Notes that the first news, the welcome, has come."""

    welcomed: threading.Event = field(default_factory=threading.Event)

    def receive(self, news: pb.AttachNews) -> None:
        self.welcomed.set()
        super().receive(news)


def attach(
    client: ManagerClient,
    group_rank: int,
    *,
    welcomes: bool = True,
    **wanted: Callable[..., None],
) -> None:
    """Return when the manager knows that the worker lives: other calls are not ordered with that.

    Of its news, all that is not ``wanted`` is ignored. ``welcomes``: False for a manager of a test
    that sends none.
    """
    ignoring: dict[str, Any] = dict.fromkeys((each.name for each in fields(Listeners)), _ignore)
    listeners = _Welcomed(**{**ignoring, **wanted})
    client.attach(group_rank, listeners)
    if welcomes:
        assert listeners.welcomed.wait(START_S), "the manager does not welcome the worker"


def _ignore(*_: object) -> None:
    pass


def members(answer: Any) -> list[str]:
    """The members of the quorum that a lighthouse has answered with."""
    return [member.replica_id for member in answer.quorum.participants]


def failure(future: Any) -> tuple[grpc.StatusCode, str]:
    """The status and the sentence with which a call failed."""
    error = future.exception(timeout=30)
    assert error is not None, f"answered {future.result()}"
    return error.code(), error.details()


def end_tree(process: Any) -> None:
    """Kill a launcher and everything below it, also what has a session of its own."""
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(process.pid)
        root.suspend()  # or it would restart what is killed below it
        for descendant in [*root.children(recursive=True), root]:
            with contextlib.suppress(psutil.NoSuchProcess):
                descendant.kill()
    process.wait()


def is_alive(pid: int) -> bool:
    """False for a process that has ended, also if nobody has waited for it yet."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


@contextlib.contextmanager
def grpc_server(
    handler: grpc.GenericRpcHandler, let_go: Callable[[], object] = lambda: None
) -> Iterator[str]:
    """The address of a server of a test's own; ``let_go`` ends the calls that still wait in it."""
    with ThreadPoolExecutor(20) as pool:
        server = grpc.server(pool)
        server.add_generic_rpc_handlers((handler,))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            let_go()
            server.stop(0).wait()
