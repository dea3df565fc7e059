"""Runs ``python -m tools.chaos``; exit status 1 if an invariant broke or a bound was missed."""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
import uuid
from itertools import islice
from pathlib import Path

import click

from tools.chaos.cluster import Cluster
from tools.chaos.director import Director, RunFailed
from tools.chaos.faults import draw_faults
from tools.chaos.options import PROCESS_GROUPS
from tools.chaos.records import read_records
from tools.chaos.verdicts import Run, judge
from tools.demo.orphans import end_leftovers

try:
    from tools.chaos.report import draw_picture, print_report, write_json
    from tools.demo.report import conclude, make_console
except ModuleNotFoundError as error:
    sys.exit(f"the report needs {error.name}: pip install '.[demo]'")

# On a busy machine a manager needs a while to notice that its worker is dead.
_LEFTOVER_GRACE_S = 5.0


@click.command(context_settings={"show_default": True})
@click.option("--minutes", type=click.FloatRange(min=0.05), default=10.0, help="How long.")
@click.option(
    "--seed", type=int, default=0, help="Determines which faults happen, where, and when."
)
@click.option(
    "--groups",
    type=click.IntRange(2),
    default=3,
    help="Replica groups of one worker, the first job; a few faults need three.",
)
@click.option(
    "--pairs",
    type=click.IntRange(0),
    default=2,
    help="Replica groups of two workers, the second job.",
)
@click.option(
    "--lighthouses",
    type=click.IntRange(1, 2),
    default=1,
    help="2: a list without leader election; a fault on the way back to the first may split a job.",
)
@click.option(
    "--process-group",
    type=click.Choice(PROCESS_GROUPS),
    default="gloo",
    help="With NCCL, all workers train on the first CUDA device.",
)
@click.option(
    "--report",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("chaos-report.png"),
    help="The picture; the figures go beside it as JSON.",
)
def main(
    minutes: float,
    seed: int,
    groups: int,
    pairs: int,
    lighthouses: int,
    process_group: str,
    report: Path,
) -> None:
    """Train real groups under every kind of fault, and check every promise."""
    if pairs == 1:
        raise click.UsageError("--pairs 1 leaves no group that can continue: use 0, 2 or more")
    console = make_console()
    folder = Path(tempfile.mkdtemp(prefix="torchft-chaos-"))
    jobs, sizes = assign_groups(groups, pairs)
    run = perform(folder, minutes * 60, seed, jobs, sizes, lighthouses, process_group=process_group)
    verdicts = judge(run)
    print_report(console, run, verdicts)
    write_json(run, verdicts, seed, report.with_suffix(".json"))
    draw_picture(run, report)
    console.print(f"seed {seed}, picture: {report}", soft_wrap=True)
    status = conclude(console, verdicts, folder, interrupted=run.interrupted)
    if status == 0:
        shutil.rmtree(folder)
    sys.exit(status)


def assign_groups(groups: int, pairs: int) -> tuple[dict[str, list[int]], dict[int, int]]:
    """The groups of each job, and how many workers each group has."""
    jobs = {"one": list(range(groups))}
    if pairs:
        jobs["two"] = list(range(groups, groups + pairs))
    return jobs, {group: 1 if group < groups else 2 for group in range(groups + pairs)}


def perform(
    folder: Path,
    seconds: float,
    seed: int,
    jobs: dict[str, list[int]],
    sizes: dict[int, int],
    num_lighthouses: int = 1,
    max_faults: int | None = None,
    *,
    process_group: str = "gloo",
) -> Run:
    """The whole run, to the end of its last process; it ends after ``max_faults``, or the time."""
    mark = uuid.uuid4().hex
    _print_progress(0.0, f"seed {seed}; logs and events: {folder}")
    cluster = Cluster(folder, jobs, sizes, seed, mark, num_lighthouses, process_group)
    faults = islice(draw_faults(seed, jobs, sizes, num_lighthouses), max_faults)
    director = Director(cluster, faults, seconds, _print_progress)
    failure, interrupted = "", False
    try:
        with cluster:
            director.run()
    except RunFailed as error:
        failure = str(error)
    except KeyboardInterrupt:
        interrupted = True
    event_logs = [log for lighthouse in cluster.lighthouses for log in lighthouse.event_logs]
    return Run(
        seen=director.history,
        incidents=director.incidents,
        records=read_records(event_logs, time.time() - time.monotonic()),
        readings=director.readings,
        began_at=director.began_at,
        leftovers=end_leftovers(mark, _LEFTOVER_GRACE_S),
        interrupted=interrupted,
        failure=failure,
    )


def _print_progress(elapsed_s: float, sentence: str) -> None:
    # Not wrapped, coloured or buffered: it is read by programs, and by people as it comes.
    print(f"{elapsed_s:7.1f} s  {sentence}", flush=True)


if __name__ == "__main__":
    main()
