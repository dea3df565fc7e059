"""The fork server: importing torch takes seconds, forking from it milliseconds.

It never starts a thread and never uses a device, so the forked processes may do both. Each message
on its socket carries the socket of a process to fork. It exits with the trainer.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import sys
import traceback
from multiprocessing.connection import Connection

from torchft_svc.client.process_groups.isolated.child import Child, watch
from torchft_svc.client.process_groups.isolated.messages import MAX_FORK_MESSAGE

# Interval at which the trainer is checked where the system has no process descriptors.
POLL_S = 0.5


def serve(requests: socket.socket, trainer_pid: int) -> None:
    """Fork a process for each of ``requests``; report its id, and later its exit status."""
    wake, woken = socket.socketpair()
    woken.setblocking(False)
    signal.set_wakeup_fd(woken.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    trainer = watch(trainer_pid)
    watched: list[socket.socket | int] = [requests, wake, *([] if trainer is None else [trainer])]
    requests.send(b"ready")
    while os.getppid() == trainer_pid:
        readable, _, _ = select.select(watched, [], [], POLL_S if trainer is None else None)
        if wake in readable:
            wake.recv(MAX_FORK_MESSAGE)
            _reap(requests)
        if requests in readable:
            message, descriptors, _, _ = socket.recv_fds(requests, MAX_FORK_MESSAGE, 1)
            if not message:
                break
            pid = os.fork()
            if pid == 0:
                for end in (requests, wake, woken):
                    end.close()
                _be_child(descriptors[0], trainer_pid)
            os.close(descriptors[0])
            requests.send(b"forked %s %d" % (message.split()[1], pid))
    signal.set_wakeup_fd(-1)  # before it is closed: the last processes exit just now


def _reap(requests: socket.socket) -> None:
    with contextlib.suppress(ChildProcessError, ConnectionError):  # nothing to reap, or no trainer
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            pid, status = ended
            requests.send(b"ended %d %d" % (pid, os.waitstatus_to_exitcode(status)))


def _be_child(descriptor: int, trainer_pid: int) -> None:
    """Never returns: the child must not continue as the server."""
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        Child(Connection(descriptor)).run(trainer_pid)
        status = 0
    except Exception:  # noqa: BLE001 - the process exits and prints why
        traceback.print_exc()
    finally:
        os._exit(status)  # a hanging operation would block an ordinary exit


def main() -> None:
    """``fork_server_main DESCRIPTOR PID``: the socket to the trainer, and its process id."""
    descriptor, trainer_pid = map(int, sys.argv[1:])
    # A terminal or a service manager signals all processes; this one exits with the trainer.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    gc.freeze()  # a collection in a child would otherwise copy these pages
    serve(socket.socket(fileno=descriptor), trainer_pid)


if __name__ == "__main__":
    main()
