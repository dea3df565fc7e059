"""A parameter server that doubles what its clients send, or one such client.

``serve``: prints its address, and a line when a session begins or has ended. ``ask ADDRESS``: uses
a session until it is killed. ``--fork``: also leaves a child that outlives it, and holds whatever
it inherited.
"""

from __future__ import annotations

import argparse
import os
import time
from datetime import timedelta

import torch

from torchft_svc.client import ProcessGroup, ProcessGroupGloo
from torchft_svc.client.parameter_server import ParameterServer
from torchft_svc.errors import SessionEnded

TIMEOUT = timedelta(seconds=60)
_LIFE_S = 60.0


class Doubling(ParameterServer):
    """Answers each vector of two numbers by its double; ends a session at a negative one."""

    @classmethod
    def new_process_group(cls) -> ProcessGroup:
        return ProcessGroupGloo(TIMEOUT)

    def forward(self, session_id: str, pg: ProcessGroup) -> None:
        print("session", flush=True)
        numbers = torch.zeros(2)
        try:
            while True:
                pg.recv([numbers], 1, 0).wait()
                if numbers[0] < 0:
                    raise ValueError("a negative number")
                pg.send([2 * numbers], 1, 0).wait()
        except SessionEnded as error:
            print(f"ended: {error}", flush=True)


def ask(group: ProcessGroup, number: float) -> float:
    """Send ``number``, and return what the server answers."""
    numbers = torch.tensor([number, 0.0])
    group.send([numbers], 0, 0).wait()
    group.recv([numbers], 0, 0).wait()
    return float(numbers[0])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["serve", "ask"])
    parser.add_argument("address", nargs="?", default="")
    parser.add_argument("--fork", action="store_true")
    flags = parser.parse_args()
    if flags.command == "serve":
        server = Doubling(0, bind_host="127.0.0.1")
        print(server.address(), flush=True)
    else:
        group = Doubling.new_session(flags.address)
        print("answer", ask(group, 3.0), flush=True)
    if flags.fork and not os.fork():
        time.sleep(_LIFE_S)
        os._exit(0)
    time.sleep(_LIFE_S)


if __name__ == "__main__":
    main()
