"""A store at which process groups of one process meet."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import pytest
from torch.distributed import TCPStore

from support.running import eventually
from support.training import together
from torchft_svc.client import ProcessGroup

# Kinds of groups whose collectives run in a process of their own, as tests call them.
_ISOLATED = ("baby", "isolated")


def marked(kinds: Iterable[str]) -> list[Any]:
    """Kinds of groups as parameters of a fixture; `processes` where they start some."""
    return [
        pytest.param(kind, marks=[pytest.mark.processes] if kind in _ISOLATED else [])
        for kind in kinds
    ]


class MeetingPlace:
    """A store, and groups that meet there."""

    def __init__(self) -> None:
        self.store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self.quorum_id = 0

    def place(self, quorum_id: int) -> str:
        return f"localhost:{self.store.port}/torchft/{quorum_id}/0"

    def end(self) -> None:
        """End the store, and with it gloo's wait for members that will not come."""
        del self.store
        eventually(lambda: "gloo-connect" not in {each.name for each in threading.enumerate()})

    def configure(self, *groups: ProcessGroup) -> None:
        """A new quorum of ``groups``."""
        self.quorum_id += 1
        where, number = self.place(self.quorum_id), self.quorum_id
        together(
            *(
                lambda rank=rank, group=group: group.configure(
                    where, f"group {rank}", rank, len(groups), quorum_id=number
                )
                for rank, group in enumerate(groups)
            )
        )
