"""A trainer with isolated collectives and a forked child; prints who is who, and waits."""

from __future__ import annotations

import os
import time
from datetime import timedelta

from support.meeting_place import MeetingPlace
from torchft_svc.client import ProcessGroupBabyGloo

group = ProcessGroupBabyGloo(timedelta(seconds=20))
MeetingPlace().configure(group)
forked = os.fork()  # as a DataLoader's worker is: it keeps every descriptor open
if forked == 0:
    time.sleep(60)
    os._exit(0)
print(group.pid, forked, flush=True)
time.sleep(60)
