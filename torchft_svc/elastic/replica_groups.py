"""Runs replica groups of one job on this machine, and prepared spares: ``--spares`` of torchft-run.

Each group is a launcher of its own, started as ``torchft-run --standalone``, whose workers are the
group. `ReplicaGroups` decides what follows the end of one; this executes it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch

from torchft_svc import env
from torchft_svc.coordination import LighthouseClient, LighthouseServer
from torchft_svc.core.launch.replica_groups import (
    EndLaunch,
    EndReplicaGroups,
    GiveUpReplicaGroup,
    GroupsOrders,
    GroupsRules,
    GroupsView,
    ReplicaGroups,
    RequestJobStatus,
    SeenGroup,
    StartReplicaGroup,
)
from torchft_svc.core.quorum.names import stable_name
from torchft_svc.core.quorum.types import DEFAULT_JOB
from torchft_svc.elastic.workers import tied
from torchft_svc.errors import RequestRefused, TorchFTError
from torchft_svc.host.clean_start import ended_how
from torchft_svc.host.process_end import POLL_S
from torchft_svc.host.worker_process import KILL_S, SpawnedProcess

log = logging.getLogger(__name__)

_NAME_VARIABLE = "REPLICA_GROUP_ID"
_NUM_VARIABLE = "NUM_REPLICA_GROUPS"
_LIGHTHOUSE_VARIABLE = "TORCHFT_LIGHTHOUSE"
_DEVICES_VARIABLE = "CUDA_VISIBLE_DEVICES"
_STATUS_TIMEOUT = timedelta(seconds=2)
# The default of the command `lighthouse`: groups that start together meet in the first quorum.
_STARTUP_WAIT_MS = 1000
# How much longer than its workers the launcher of a group may take to end.
_END_SLACK_S = 5.0
_ENDING_SIGNALS = signal.SIGTERM, signal.SIGINT, signal.SIGHUP


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupsConfig:
    """What a launcher of replica groups runs.

    Args:
        rules: how many groups, spares and restarts.
        command: the launcher of each group, as arguments of the Python interpreter.
        num_workers: the workers of each group.
        shutdown_timeout_s: how long the workers may take to end.
    """

    rules: GroupsRules
    command: Sequence[str]
    num_workers: int
    shutdown_timeout_s: float


def run_replica_groups(config: GroupsConfig) -> int:
    """Run the groups until they have ended, and return the exit status of the launcher.

    Call it on the main thread, because it handles signals. An exception ends the groups, too.
    """
    with _job_lighthouse() as address, _GroupsLauncher(config, address) as launcher:
        return launcher.run()


@contextlib.contextmanager
def _job_lighthouse() -> Iterator[str]:
    """Return the address of the job's lighthouse; if none is given, serve one on this machine."""
    given = env.value_of(_LIGHTHOUSE_VARIABLE, "").strip()
    if given:
        yield given
        return
    server = LighthouseServer("127.0.0.1:0", 1, startup_wait_ms=_STARTUP_WAIT_MS)
    try:
        log.info("the groups meet at the lighthouse %s", server.address())
        yield server.address()
    finally:
        server.shutdown()


class _GroupsLauncher:
    """Executes what `ReplicaGroups` decides. All calls come from the main thread."""

    def __init__(self, config: GroupsConfig, lighthouse: str) -> None:
        self._config = config
        self._lighthouse = lighthouse
        self._machine = ReplicaGroups(config.rules)
        self._processes: dict[int, SpawnedProcess] = {}
        self._status: int | None = None
        self._signal: signal.Signals | None = None
        self._kill_at: dict[int, float] = {}  # when to kill the groups that were signalled to end
        self._job = env.Environment().job_id or DEFAULT_JOB
        self._names = _group_names(config.rules)
        self._devices = _device_parts(config)
        self._wake, self._woken = socket.socketpair()

    def __enter__(self) -> _GroupsLauncher:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.send_signal(signal.SIGKILL)
            process.end.wait(KILL_S)
            process.close(kill_rest=True)
        self._wake.close()
        self._woken.close()

    def run(self) -> int:
        with self._handling_signals():
            self._execute(self._machine.start_all(time.monotonic()))
            while self._status is None:
                self._run_once()
        return self._status

    def _run_once(self) -> None:
        self._wait()
        if self._signal is not None:
            number, self._signal = self._signal, None
            self._execute(self._machine.interrupt(f"this launcher has received {number.name}"))
        for index, process in list(self._processes.items()):
            if (status := process.poll()) is not None:
                self._record_end(index, process, status)
        now = time.monotonic()
        for index in [index for index, at in self._kill_at.items() if now >= at]:
            del self._kill_at[index]
            self._processes[index].send_signal(signal.SIGKILL)
        self._execute(self._machine.tick(now))

    def _record_end(self, index: int, process: SpawnedProcess, status: int) -> None:
        del self._processes[index]
        self._kill_at.pop(index, None)
        process.close(kill_rest=True)
        if status:
            log.warning("the launcher of group %s %s", self._names[index], ended_how(status))
        else:
            log.info("group %s has finished", self._names[index])
        self._execute(self._machine.group_ended(index, status, time.monotonic()))

    def _wait(self) -> None:
        """Wait until a group has ended, a signal has come, or something is due."""
        now = time.monotonic()
        due_at = min(self._machine.next_deadline(), *self._kill_at.values(), math.inf)
        left_s = max(0.0, due_at - now)
        watched = [fd for process in self._processes.values() for fd in process.descriptors]
        if len(watched) < len(self._processes):
            left_s = min(left_s, POLL_S)
        poll = select.poll()
        for descriptor in (*watched, self._woken.fileno()):
            poll.register(descriptor, select.POLLIN)
        ready = poll.poll(None if left_s == math.inf else math.ceil(1000 * left_s))
        if any(descriptor == self._woken.fileno() for descriptor, _ in ready):
            self._woken.recv(64)

    @contextlib.contextmanager
    def _handling_signals(self) -> Iterator[None]:
        """End the groups in order when this process is to end, unless that signal was ignored."""
        chosen = [each for each in _ENDING_SIGNALS if signal.getsignal(each) != signal.SIG_IGN]
        before = {each: signal.signal(each, self._note_signal) for each in chosen}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

    def _note_signal(self, number: int, _: object) -> None:
        self._signal = signal.Signals(number)
        self._wake.send(b"!")

    # -- orders ------------------------------------------------------------------------------------

    def _execute(self, given: GroupsOrders) -> None:
        left = list(given)
        while left:
            order = left.pop(0)
            if isinstance(order, StartReplicaGroup):
                left += self._start(order)
            elif isinstance(order, RequestJobStatus):
                left += self._machine.status_received(self._request_view(), time.monotonic())
            elif isinstance(order, EndReplicaGroups):
                self._end_groups(order)
            elif isinstance(order, GiveUpReplicaGroup):
                name = self._names[order.index]
                log.error("group %s is not started again: it has used its --max-restarts", name)
            else:
                assert isinstance(order, EndLaunch)
                self._status = order.status

    def _start(self, order: StartReplicaGroup) -> GroupsOrders:
        name = self._names[order.index]
        entrypoint, words = tied(sys.executable, tuple(self._config.command))
        environment = env.for_child(self._variables(order.index, is_spare=order.is_spare))
        try:
            process = SpawnedProcess([str(entrypoint), *map(str, words)], environment)
        except OSError as error:
            log.error("group %s could not be started: %s", name, error)
            return self._machine.group_ended(order.index, 1, time.monotonic())
        self._processes[order.index] = process
        role = "stands by" if order.is_spare else "starts"
        log.info("group %s %s, its launcher is process %d", name, role, process.pid)
        return ()

    def _variables(self, index: int, *, is_spare: bool) -> Mapping[str, str | None]:
        rules = self._config.rules
        variables: dict[str, str | None] = {
            _NAME_VARIABLE: self._names[index],
            _LIGHTHOUSE_VARIABLE: self._lighthouse,
            _NUM_VARIABLE: env.value_of(_NUM_VARIABLE, "").strip() or str(rules.num_groups),
            "TORCHFT_SPARE": "1" if is_spare else None,
        }
        if rules.num_spares and self._config.num_workers == 1:
            # Functions that gather a state of several workers must not be called for a preview.
            variables["TORCHFT_CATCH_UP"] = env.value_of("TORCHFT_CATCH_UP", "1")
        if self._devices:
            variables[_DEVICES_VARIABLE] = self._devices[index]
        return variables

    def _request_view(self) -> GroupsView | None:
        """Return what the lighthouse knows of the job (None: it does not answer)."""
        try:
            with LighthouseClient(self._lighthouse, _STATUS_TIMEOUT) as client:
                (found,) = client.status(self._job, _STATUS_TIMEOUT)
        except RequestRefused:  # nobody has come yet
            return GroupsView()
        except TorchFTError as error:
            log.warning("the lighthouse cannot be asked for the job's groups: %s", error)
            return None
        if found.ended_s is not None:
            return GroupsView(is_finished=found.finished, num_places=found.num_places)
        groups = {stable_name(each.replica_id): each for each in found.groups}
        own = {
            index: SeenGroup(groups[name].replica_id, groups[name].in_quorum)
            for index, name in enumerate(self._names)
            if name in groups
        }
        others = groups.keys() - set(self._names)
        return GroupsView(
            others_train=any(groups[name].in_quorum for name in others),
            num_places=found.num_places,
            own_groups=own,
        )

    def _end_groups(self, order: EndReplicaGroups) -> None:
        log.warning("ending %d groups: %s", len(order.indices), order.reason)
        kill_at = time.monotonic() + self._config.shutdown_timeout_s + _END_SLACK_S
        for index in order.indices:
            self._processes[index].send_signal(signal.SIGTERM)
            self._kill_at[index] = kill_at


def _group_names(rules: GroupsRules) -> list[str]:
    """Return the names of all groups: ``0``, or ``NAME-0`` if this launcher has a name itself."""
    base = env.value_of(_NAME_VARIABLE, "").strip()
    total = rules.num_groups + rules.num_spares
    return [f"{base}-{index}" if base else str(index) for index in range(total)]


def _device_parts(config: GroupsConfig) -> list[str]:
    """Return the GPUs of each group, one for each worker (empty: all groups see the same ones)."""
    given = env.value_of(_DEVICES_VARIABLE, "").strip()
    devices = given.split(",") if given else list(map(str, range(torch.cuda.device_count())))
    if not devices:
        return []
    total, num_each = config.rules.num_groups + config.rules.num_spares, config.num_workers
    if len(devices) < total * num_each:
        log.warning(
            "%d groups of %d workers see the same %d GPUs: there is not one for each worker",
            total,
            num_each,
            len(devices),
        )
        return []
    return [",".join(devices[num_each * i : num_each * (i + 1)]) for i in range(total)]


def command_of_group(arguments: Sequence[str], num_script_words: int) -> list[str]:
    """Return the command of a group's launcher, made of the ``arguments`` of this one.

    The last ``num_script_words`` of these are the script and its arguments.
    """
    at = len(arguments) - num_script_words
    options, script = list(arguments[:at]), list(arguments[at:])
    separator = [options.pop()] if options and options[-1] == "--" else []
    # Of an option that is given twice, the later one counts.
    ours = ["--replica-groups=1", "--spares=0", "--max-restarts=0", "--standalone", "--nnodes=1"]
    return ["-m", "torchft_svc.elastic.run", *options, *ours, *separator, *script]
