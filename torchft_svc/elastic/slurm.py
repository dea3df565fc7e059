"""Runs a replica group as a Slurm job, and requeues it unless a restart would not help.

    exec python -m torchft_svc.elastic.slurm [options] -- srun torchft-run ... train.py

In a batch script with ``--signal=B:TERM@60``, as `deploy/slurm/group.sbatch`: Slurm's signal comes
to this process alone, which passes it on to the command. The end of the command decides:

    status 0                  the job has finished
    93                        it ends with that status: no restart would help
    0 or any, after a signal  it was preempted, or its time is over: requeue
    any other                 requeue
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from torchft_svc import env
from torchft_svc.core.restart_progress import RestartProgress
from torchft_svc.errors import ConfigError, UsageError
from torchft_svc.host.exit_verdict import do_not_requeue_exit_code, final_exit_code
from torchft_svc.host.progress_file import highest_step

# Slurm's own deadline for a controller that does not answer is shorter.
_REQUEUE_S = 60.0
# Failures that are remembered to find out whether restarts get somewhere.
_MAX_REMEMBERED = 1000
_SHELL_STATUS = 128  # what a shell reports for a signal, less the number of that


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torchft_svc.elastic.slurm",
        description="Run a replica group as a Slurm job, and requeue it where a restart may help.",
    )
    parser.add_argument(
        "--grace",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="what --signal=B:TERM@60 gives (default 60): programs see it",
    )
    parser.add_argument(
        "--state-dir",
        default=".torchft-slurm",
        metavar="DIR",
        help="a folder that outlives the job, for its steps (default .torchft-slurm)",
    )
    parser.add_argument(
        "--max-requeues",
        type=int,
        metavar="NUMBER",
        help="requeue at most so often (default: any number)",
    )
    parser.add_argument(
        "--max-restarts-without-progress",
        type=int,
        metavar="NUMBER",
        help="do not requeue when so many restarts have not got beyond a step (default: any)",
    )
    parser.add_argument("command", nargs="+", help="what to run, behind --")
    return parser


class SlurmJob:
    """This job, by the variables that Slurm sets for it.

    Raises:
        ConfigError: this is no Slurm job.
    """

    def __init__(self) -> None:
        job_id = env.value_of("SLURM_JOB_ID", "")
        if not job_id:
            raise ConfigError("SLURM_JOB_ID", None, "start this in a batch script, by sbatch")
        array, index = (
            env.value_of("SLURM_ARRAY_JOB_ID", ""),
            env.value_of("SLURM_ARRAY_TASK_ID", ""),
        )
        #: What scontrol calls it, and what its state is kept under.
        self.name = f"{array}_{index}" if array and index else job_id
        self.num_requeues = int(env.value_of("SLURM_RESTART_COUNT", "0") or 0)

    def requeue(self) -> str:
        """Requeue the job; return why that failed (empty: it did not)."""
        try:
            done = subprocess.run(
                ["scontrol", "requeue", self.name],  # noqa: S607 - the cluster's own
                capture_output=True,
                text=True,
                timeout=_REQUEUE_S,
                check=False,
            )
        except OSError as error:
            return f"scontrol cannot be started: {error.strerror}"
        except subprocess.TimeoutExpired:
            return f"scontrol did not answer within {_REQUEUE_S:g} s"
        words = " ".join(f"{done.stdout} {done.stderr}".split())
        return "" if done.returncode == 0 else f"scontrol: {words or done.returncode}"


class _Command:
    """The command, and the first signal that was passed on to it."""

    def __init__(self) -> None:
        self.was_signalled = False
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, words: Sequence[str]) -> int:
        """Run it; return its exit status, as a shell reports it."""
        signal.signal(signal.SIGTERM, self._pass_on)
        try:
            self._process = subprocess.Popen(words)
        except OSError as error:
            raise ConfigError("command", words[0], f"{error.strerror}") from None
        if self.was_signalled:
            self._process.terminate()
        status = self._process.wait()
        return status if status >= 0 else _SHELL_STATUS - status

    def _pass_on(self, number: int, _: object) -> None:
        self.was_signalled = True
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)


def _why_in_vain(file: Path, step: int | None, limit: int | None) -> str:
    """Record a failure at ``step`` in ``file``; return why a restart would be in vain."""
    try:
        steps = json.loads(file.read_text())[-_MAX_REMEMBERED:]
    except (OSError, ValueError, TypeError):
        steps = []
    steps.append(step)
    file.write_text(json.dumps(steps))
    progress, why = RestartProgress(limit), ""
    for each in steps:
        why = progress.record_failure(each if isinstance(each, int) else None)
    return why


def _print_sentence(sentence: str) -> None:
    print(f"torchft-slurm: {sentence}", file=sys.stderr, flush=True)


def run(args: Sequence[str] | None = None) -> int:
    """Run the job, and return its exit status.

    Raises:
        ConfigError: an argument, or the environment, cannot work.
    """
    options = _parser().parse_args(args)
    RestartProgress(options.max_restarts_without_progress)  # refuses what cannot work
    job, final_code = SlurmJob(), do_not_requeue_exit_code()
    folder = Path(options.state_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("--state-dir", options.state_dir, str(error.strerror)) from None
    file = folder / re.sub(r"[^\w.-]", "_", job.name)
    env.update(
        {
            env.VERDICT_VARIABLE: str(final_code),
            env.PROGRESS_VARIABLE: str(file.absolute()),
            "TORCHFT_GRACE_SEC": f"{options.grace:g}",
        }
    )
    command = _Command()
    status = command.run(options.command)
    if status == 0 and not command.was_signalled:
        return 0
    if status == final_code:
        _print_sentence(f"status {status}: no restart would help, so the job is not requeued")
        return status
    if not command.was_signalled:
        limit = options.max_restarts_without_progress
        why = _why_in_vain(Path(f"{file}-failures.json"), highest_step(file), limit)
        if why:
            _print_sentence(f"status {status}: {why}, so the job is not requeued")
            return final_code
    if options.max_requeues is not None and job.num_requeues >= options.max_requeues:
        _print_sentence(
            f"status {status}: it was requeued {job.num_requeues} times, which is the limit"
        )
        return status or 1
    reason = "it was asked to end" if command.was_signalled else "it has failed"
    _print_sentence(f"status {status}: {reason}, requeueing job {job.name}")
    if failure := job.requeue():
        _print_sentence(f"job {job.name} is not requeued: {failure}")
        return status or 1
    return status


def main(args: Sequence[str] | None = None) -> None:
    """The command."""
    try:
        sys.exit(run(args))
    except UsageError as error:
        _print_sentence(f"error: {error}")
        sys.exit(final_exit_code())


if __name__ == "__main__":
    main()
