"""The steps that this machine's workers have committed, and until when they have to end.

A worker records its step in a file that outlives it (`torchft_svc.host.progress_file`). So its
agent knows how far it was, also if it was killed.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from torchft_svc import env
from torchft_svc.host.exit_verdict import do_not_requeue_exit_code
from torchft_svc.host.progress_file import ProgressFile, highest_step

# Of a time limit, an agent needs so much to kill what is left and to end itself.
END_SLACK_S = 1.0


class WorkerProgress:
    """What the workers of a node record, each in a file ``base`` with its local rank behind.

    ``final_code``: the exit code of a worker whose error a restart cannot mend.
    """

    def __init__(self, base: str, num_workers: int, final_code: int) -> None:
        self.final_code = final_code
        self._base = base
        self._files = [ProgressFile(f"{base}.{rank}") for rank in range(num_workers)]
        for file in self._files:
            file.record_drain(None)  # of an earlier agent

    @property
    def step(self) -> int | None:
        """The highest step that a worker has committed; None: they record none."""
        return highest_step(self._base)

    def record_end(self, within_s: float) -> None:
        """Record for the workers, before they are signalled, that SIGKILL follows so much later."""
        until = time.monotonic() + within_s
        for file in self._files:
            file.record_drain(until)

    def close(self) -> None:
        """Unmap the files."""
        for file in self._files:
            file.close()


@contextlib.contextmanager
def recording_progress(num_workers: int, host: str) -> Iterator[WorkerProgress]:
    """Let the workers that are started in this block record their progress, and give verdicts.

    The files are those that the environment names, with ``host`` behind, and outlive this process;
    otherwise they are in a folder that ends with it.

    Raises:
        ConfigError: a variable cannot work.
    """
    code = do_not_requeue_exit_code()
    given = env.value_of(env.PROGRESS_VARIABLE, "").strip()
    with contextlib.ExitStack() as stack:
        if given:
            base = f"{given}.{host}"
        else:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="torchft-progress-"))
            base = str(Path(folder, "worker"))
        progress = WorkerProgress(base, num_workers, code)
        stack.callback(progress.close)
        variables = {env.PROGRESS_VARIABLE: base, env.VERDICT_VARIABLE: str(code)}
        stack.enter_context(env.set_while(variables))
        yield progress


def usable_s(within_s: float) -> float:
    """Return how much of a time limit workers may use."""
    return max(within_s - END_SLACK_S, within_s / 2)
