"""Rules for every test: it leaves no process and no thread behind, it is marked `processes` if it
starts one, a stall of the machine does not fail it, and its random examples are always the same."""

from __future__ import annotations

# Before all that imports gRPC, which else has handlers for forks that may end a child.
import torchft_svc  # noqa: F401

# isort: split
import contextlib
import gc
import itertools
import os
import resource
import signal
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator

import psutil
import pytest
from hypothesis import settings
from support.adopted import ADOPTED, spawn_adopted
from support.bounds import again_if_late
from support.running import lives

from torchft_svc.core.quorum.lighthouse import lighthouse
from torchft_svc.core.quorum.manager import group
from torchft_svc.host.fork_server import FORK_EVENT, replace_spawner
from torchft_svc.rpc import calls

# What a test has asked to end gets so long to be gone, on a machine that may stall.
ENDING_S = 15.0
# torch looks up the name of whoever connects; a name server's lost answer must not cost 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
# Where it is set, each of the hundreds of processes that the tests start would compile the package.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# A shell lets what it starts in the background ignore this, and so would all that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
for _ignored in (signal.SIGHUP, signal.SIGQUIT):  # so does `nohup`
    signal.signal(_ignored, signal.SIG_DFL)
# Inherited by all that a test starts: it is found again even after its parent has died.
_MARK = "TORCHFT_TEST_SESSION"
# These run until the session ends: multiprocessing's own process, and the fork servers of the
# package and of the tests. Their forks have the same command line, but another parent.
_SESSION_WIDE = (
    "multiprocessing.resource_tracker",
    "isolated.child",
    "support.fork_server_main",
)
# Threads that nobody joins: those of fork servers, of abandoned operations until their timeout, and
# the one that destroys the process groups of left worlds, which waits for the next of them.
_OWNERLESS = ("torchft-fork-server", "torchft-abandoned", "torchft-world-destroyer")

_LAUNCHER_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)

_STARTED_BEFORE = pytest.StashKey[int]()
# The audit events so far by which this process has started others.
_started: list[str] = []


def _record_start(event: str, _: object = None) -> None:
    if event in ("subprocess.Popen", "os.fork", "os.posix_spawn", FORK_EVENT):
        _started.append(event)


sys.addaudithook(_record_start)
replace_spawner(spawn_adopted)

# `--hypothesis-profile=explore` draws others, and remembers those that fail.
settings.register_profile("explore", deadline=None)
settings.register_profile("fixed", deadline=None, derandomize=True, database=None)
settings.load_profile("fixed")


@pytest.fixture(autouse=True)
def _environment_and_signals() -> Iterator[None]:
    """torch's launcher changes both in the process that calls it, and puts neither back."""
    variables = dict(os.environ)
    handlers = {number: signal.getsignal(number) for number in _LAUNCHER_SIGNALS}
    yield
    for name in {*variables, *os.environ} - {"PYTEST_CURRENT_TEST"}:
        if name not in variables:
            del os.environ[name]
        elif os.environ.get(name) != variables[name]:
            os.environ[name] = variables[name]
    for number, handler in handlers.items():
        if handler is not None and signal.getsignal(number) is not handler:
            signal.signal(number, handler)


@pytest.fixture(autouse=True)
def _no_active_ddp_module() -> Iterator[None]:
    """torch restores the active wrapper after each forward pass, but those of two threads, which
    overlap, restore each other's, and then torch.compile splits the graphs of every later test."""
    yield
    if torch_ddp := sys.modules.get("torch.nn.parallel.distributed"):
        torch_ddp.DistributedDataParallel._active_ddp_module = None


def pytest_configure() -> None:
    """Give Ray's workers the cores' time that others get: by default, Ray lowers their priority."""
    os.environ.setdefault("RAY_worker_niceness", "0")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start with the files that use Ray, the longest first, and those that start processes, in
    turns: a cluster for each runner at once is more than two cores can serve in time.

    What only computes fills the gaps at the end, the simulator's long files first.
    """
    sizes, with_processes = (
        Counter(item.path for item in items if item.get_closest_marker(marker))
        for marker in ("ray", "processes")
    )
    with_ray = [path for path, _ in sizes.most_common()]
    without_ray = [path for path in with_processes if path not in sizes]
    in_turns = itertools.chain.from_iterable(itertools.zip_longest(with_ray, without_ray))
    simulator = [item.path for item in items if "sim" in item.path.parts]
    places = {path: place for place, path in enumerate(dict.fromkeys([*in_turns, *simulator]))}
    items.sort(key=lambda item: places.get(item.path, len(places)))


def pytest_collection_finish() -> None:
    """Exempt what has been imported from collections of garbage: it stays."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> None:
    pyfuncitem.obj = again_if_late(pyfuncitem.obj)


@pytest.fixture(scope="session", autouse=True)
def _mark_processes() -> Iterator[str]:
    mark = uuid.uuid4().hex
    os.environ[_MARK] = mark
    yield mark
    del os.environ[_MARK]


@pytest.fixture
def early_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the time after which services of this process give a reason for a call's timeout.

    They do so after 0.3 s of a call of 10 s: long before the caller's own clock would end it
    without a reason.
    """
    monkeypatch.setattr(calls, "MARGIN", 0.97)
    monkeypatch.setattr(calls, "MAX_MARGIN_S", 10.0)


@pytest.fixture
def early_news(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make services of this process report, or act, after 0.2 s instead of 2 s or 5 s."""
    monkeypatch.setattr(lighthouse, "REPORT_PAUSE_AFTER_S", 0.2)
    monkeypatch.setattr(group, "EXPLAIN_AFTER_S", 0.2)
    monkeypatch.setattr(group, "OWNER_SILENCE_S", 0.2)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Count the starts before the first fixture, which may be one that other tests share."""
    item.stash[_STARTED_BEFORE] = len(_started)


@pytest.fixture(autouse=True)
def _marked_if_it_starts_processes(request: pytest.FixtureRequest) -> Iterator[None]:
    """`make quick` leaves out what has the marker: such tests take long on a busy machine."""
    yield
    more = _started[request.node.stash[_STARTED_BEFORE] :]
    if more and request.node.get_closest_marker("processes") is None:
        pytest.fail(f"it starts processes ({', '.join(set(more))}): mark it with `processes`")


@pytest.fixture(autouse=True)
def _nothing_is_left(_mark_processes: str) -> Iterator[None]:
    """Processes are looked at only where one was started: most tests pay microseconds."""
    threads, children, reaped = set(threading.enumerate()), _children(), _reaped()
    known = set(psutil.pids()) if children else set()
    num_started = len(_started)
    yield
    if len(_started) > num_started or _children() - children or _reaped() != reaped:
        _check_processes(_mark_processes, known)
    _check_threads(threads)


def _check_threads(before: set[threading.Thread]) -> None:
    """Daemon threads belong to libraries, except ours, which have owners that join them."""
    deadline = time.monotonic() + ENDING_S
    left: list[threading.Thread] = []
    for thread in set(threading.enumerate()) - before:
        if thread.daemon and not thread.name.startswith("torchft"):
            continue
        if thread.name in _OWNERLESS:
            continue
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            left.append(thread)
    if left:
        pytest.fail(f"threads left behind: {[thread.name for thread in left]}")


def _check_processes(mark: str, known: set[int]) -> None:
    left = _marked(mark, known)
    deadline = time.monotonic() + ENDING_S
    while left and time.monotonic() < deadline:
        time.sleep(0.01)
        left = {process for process in left if _counts(process)}
    lines = []
    for process in left:
        with contextlib.suppress(psutil.Error):
            lines.append(f"{process.pid}: {' '.join(process.cmdline())[:300]}")
            process.kill()
    if lines:
        pytest.fail("processes left behind (now killed):\n" + "\n".join(lines))


def _marked(mark: str, known: set[int]) -> set[psutil.Process]:
    """The living processes that were started in this session, but for those with ``known`` ids."""
    found = set(psutil.Process().children(recursive=True))  # also those with a fresh environment
    for pid in set(psutil.pids()) - known - {os.getpid()}:
        with contextlib.suppress(psutil.Error, OSError):
            process = psutil.Process(pid)
            if process.environ().get(_MARK) == mark:
                found.add(process)
    return {process for process in found if process.pid not in known and _counts(process)}


def _counts(process: psutil.Process) -> bool:
    try:
        if not lives(process):
            return False
        if process.ppid() != os.getpid() or process.pid in ADOPTED:
            return True
        command = " ".join(process.cmdline())
    except psutil.Error:
        return False
    return not any(name in command for name in _SESSION_WIDE)


def _children() -> set[int]:
    """The direct children of all threads of this process."""
    found: set[int] = set()
    try:
        for task in os.listdir("/proc/self/task"):
            with (
                contextlib.suppress(FileNotFoundError),  # a thread that has just ended
                open(f"/proc/self/task/{task}/children") as listing,
            ):
                found.update(map(int, listing.read().split()))
    except OSError:  # not Linux
        return {child.pid for child in psutil.Process().children()}
    return found


def _reaped() -> int:
    """Grows whenever a child that has ended is waited for."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt
