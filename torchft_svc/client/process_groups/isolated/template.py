"""A process that has imported torch and forks: importing takes seconds, forking milliseconds.

It never starts a thread and never looks at a device, so its copies may do both. Each message on its
socket comes with the socket of a process to fork. It ends with the trainer.
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
from torchft_svc.client.process_groups.isolated.messages import MAX_TEMPLATE_MESSAGE

# Where the system has no process descriptors, look this often whether the trainer lives.
LOOK_S = 0.5


def serve(line: socket.socket, trainer_pid: int) -> None:
    """Fork for whoever asks over ``line``, and tell what becomes of the copies."""
    wake, woken = socket.socketpair()
    woken.setblocking(False)
    signal.set_wakeup_fd(woken.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    trainer = watch(trainer_pid)
    watched: list[socket.socket | int] = [line, wake, *([] if trainer is None else [trainer])]
    line.send(b"ready")
    while os.getppid() == trainer_pid:
        readable, _, _ = select.select(watched, [], [], LOOK_S if trainer is None else None)
        if wake in readable:
            wake.recv(MAX_TEMPLATE_MESSAGE)
            _reap(line)
        if line in readable:
            message, descriptors, _, _ = socket.recv_fds(line, MAX_TEMPLATE_MESSAGE, 1)
            if not message:
                break
            pid = os.fork()
            if pid == 0:
                for end in (line, wake, woken):
                    end.close()
                _be_child(descriptors[0], trainer_pid)
            os.close(descriptors[0])
            line.send(b"born %s %d" % (message.split()[1], pid))
    signal.set_wakeup_fd(-1)  # before it is closed: the last copies end just now


def _reap(line: socket.socket) -> None:
    with contextlib.suppress(ChildProcessError, ConnectionError):  # nobody to reap, or to tell
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            pid, status = ended
            line.send(b"ended %d %d" % (pid, os.waitstatus_to_exitcode(status)))


def _be_child(descriptor: int, trainer_pid: int) -> None:
    """Never returns: the copy must not run what the template would do next."""
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        Child(Connection(descriptor)).run(trainer_pid)
        status = 0
    except Exception:  # noqa: BLE001 - the process ends, and says why
        traceback.print_exc()
    finally:
        os._exit(status)  # operations that hang would keep an ordinary exit from ending


def main() -> None:
    """``template.py DESCRIPTOR PID``: the socket to the trainer, and its process."""
    descriptor, trainer_pid = map(int, sys.argv[1:])
    # A terminal or a service manager signals all processes at once; this one ends with the trainer.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    gc.freeze()  # what is collected here need not be copied there
    serve(socket.socket(fileno=descriptor), trainer_pid)


if __name__ == "__main__":
    main()
