"""Shows the progress of a training in Kubeflow Trainer: copy this into your program.

    progress = KubeflowProgress(num_steps)
    while manager.current_step() < num_steps:
        ...
        optimizer.step()
        progress.report(manager.current_step(), loss=loss.item())
    progress.close()

Where Kubeflow Trainer has not started the program, or its feature gate is off, it does nothing.
Call it in one worker of the TrainJob.
"""

import json
import os
import ssl
import threading
import time
import urllib.request
from datetime import datetime, timezone
from pathlib import Path

PERIOD_S, TIMEOUT_S = 10.0, 5.0


class KubeflowProgress:
    """Posts the newest progress from a thread of its own: a slow controller costs no step."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._url = os.environ.get("KUBEFLOW_TRAINER_SERVER_URL", "")
        self._began_at: float | None = None
        self._began_step = 0
        self._newest: dict[str, object] | None = None
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kubeflow-progress", daemon=True)
        if self._url:
            self._thread.start()

    def report(self, step: int, **metrics: float) -> None:
        """Keep the progress for the next post."""
        now = time.monotonic()
        if self._began_at is None:
            self._began_at, self._began_step = now, step
        self._newest = {
            "progressPercentage": min(100, 100 * step // self._num_steps),
            "metrics": [{"name": name, "value": f"{value:g}"} for name, value in metrics.items()],
            "lastUpdatedTime": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        if step > self._began_step:
            step_s = (now - self._began_at) / (step - self._began_step)
            left_s = round(step_s * max(0, self._num_steps - step))
            self._newest["estimatedRemainingSeconds"] = left_s

    def close(self) -> None:
        """Post the newest progress once more, and stop."""
        self._ends.set()
        if self._url:
            self._thread.join(2 * TIMEOUT_S)

    def _run(self) -> None:
        posted = None
        while True:
            ends = self._ends.wait(PERIOD_S)
            newest = self._newest
            if newest is not posted and newest is not None:
                try:
                    self._post(newest)
                    posted = newest
                except (OSError, ValueError) as error:  # the next one may arrive
                    print(f"progress was not posted: {error}", flush=True)
            if ends:
                return

    def _post(self, status: dict[str, object]) -> None:
        # Both files are renewed while the program runs.
        token = Path(os.environ["KUBEFLOW_TRAINER_SERVER_TOKEN"]).read_text().strip()
        trust = ssl.create_default_context(cafile=os.environ["KUBEFLOW_TRAINER_SERVER_CA_CERT"])
        request = urllib.request.Request(  # noqa: S310 - the cluster names the address
            self._url,
            json.dumps({"trainerStatus": status}).encode(),
            {"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
        )
        urllib.request.urlopen(request, timeout=TIMEOUT_S, context=trust).close()  # noqa: S310
