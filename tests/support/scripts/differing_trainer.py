"""Two members that disagree on the size of a sum; says so if they come to an end."""

from __future__ import annotations

import contextlib
from datetime import timedelta

import torch

from support.meeting_place import MeetingPlace
from support.training import together
from torchft_svc.client import ProcessGroupGloo

TIMEOUT = timedelta(seconds=20)


def add(group: ProcessGroupGloo, numel: int) -> None:
    with contextlib.suppress(RuntimeError):
        group.allreduce([torch.ones(numel)]).wait(TIMEOUT)


pair = [ProcessGroupGloo(TIMEOUT) for _ in range(2)]
MeetingPlace().configure(*pair)
together(lambda: add(pair[0], 4), lambda: add(pair[1], 4096))
print("they came to an end")
