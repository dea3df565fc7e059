"""The command of the demo: ``python -m tools.demo``; exit status 1 if a promise was missed."""

from __future__ import annotations

import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import click

from tools.demo.cluster import Cluster
from tools.demo.promises import Run, judge

try:
    from rich.console import Console

    from tools.demo.director import Director, Script
    from tools.demo.picture import draw_picture
    from tools.demo.report import conclude, make_console, print_report, write_json
    from tools.demo.screen import make_screen
except ModuleNotFoundError as error:
    sys.exit(f"the demo needs {error.name}: pip install '.[demo]'")

# The start and the last heal, which no kill may fall into.
_CALM_SECONDS = 15.0
_DEFAULT_SECONDS = 60.0
_DEFAULT_KILLS_BY_STEPS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerFlags:
    """The options of every trainer."""

    seed: int
    model_size: str
    global_batch_size: int

    def command(self, group: int, incarnation: int, events: Path) -> list[str]:
        return [
            *("-m", "tools.demo.train"),
            *("--group", str(group), "--incarnation", str(incarnation), "--events", str(events)),
            *("--seed", str(self.seed), "--model-size", self.model_size),
            *("--global-batch-size", str(self.global_batch_size), "--steps", str(10**9)),
        ]


def check_options(groups: int, kills: int | None, seconds: float | None, steps: int | None) -> None:
    """Refuse what cannot work together.

    Raises:
        click.UsageError: with a sentence that names the flags.
    """
    if kills and groups < 2:
        raise click.UsageError("--kills needs --groups 2 or more: someone has to survive")
    if seconds is not None and steps is not None:
        raise click.UsageError("--seconds and --steps both say when to stop: give one")


def num_kills(groups: int, kills: int | None, interval_s: float, seconds: float | None) -> int:
    """The number asked for; else as many as fit into the time, with a calm start and end."""
    if kills is not None:
        return kills
    if groups < 2:
        return 0
    if seconds is None:
        return _DEFAULT_KILLS_BY_STEPS
    return max(0, int((seconds - _CALM_SECONDS) / interval_s))


@click.command()
@click.option("--groups", type=click.IntRange(1, 16), default=3, show_default=True)
@click.option("--seconds", type=click.FloatRange(min=1), help="Stop after this time [60].")
@click.option(
    "--steps", type=click.IntRange(1), help="Stop after this number of committed updates."
)
@click.option(
    "--kills", type=click.IntRange(0), help="Number of kills [as many as fit into the time]."
)
@click.option(
    "--kill-interval", type=click.FloatRange(min=0.1), default=10.0, show_default=True,
    help="Seconds between kills, on average.",
)  # fmt: skip
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option(
    "--model-size", type=click.Choice(["tiny", "small", "medium"]), default="small",
    show_default=True,
)  # fmt: skip
@click.option("--batch-size", type=click.IntRange(1, 1024), default=8, show_default=True,
              help="Samples of a step for each group; fewer groups share them.")  # fmt: skip
@click.option(
    "--max-stall", type=click.FloatRange(min=0.01), default=1.5, show_default=True,
    help="Seconds within which survivors must commit without the dead: the step that breaks off, a "
    "whole new one, and what else the machine is doing, included.",
)  # fmt: skip
@click.option(
    "--report", type=click.Path(dir_okay=False, path_type=Path), show_default=True,
    default=Path("demo-report.png"), help="The picture; the figures go beside it as JSON.",
)  # fmt: skip
@click.option(
    "--workdir", type=click.Path(file_okay=False, path_type=Path),
    help="Where logs and events are kept [a temporary folder, removed if all went well].",
)  # fmt: skip
def main(
    groups: int, seconds: float | None, steps: int | None, kills: int | None, kill_interval: float,
    seed: int, model_size: str, batch_size: int, max_stall: float, report: Path,
    workdir: Path | None,
) -> None:  # fmt: skip
    """Train on this machine while groups are killed and come back; check that nothing is lost."""
    check_options(groups, kills, seconds, steps)
    if steps is None and seconds is None:
        seconds = _DEFAULT_SECONDS
    fitting_kills = num_kills(groups, kills, kill_interval, seconds)
    script = Script(
        num_groups=groups,
        seconds=seconds,
        steps=steps,
        num_kills=fitting_kills,
        min_kills=min(fitting_kills, 1) if kills is None else kills,
        kill_interval_s=kill_interval,
        seed=seed,
        max_stall_s=max_stall,
    )
    flags = TrainerFlags(seed=seed, model_size=model_size, global_batch_size=batch_size * groups)
    folder = _prepare_folder(workdir, report)
    console = make_console()
    with Cluster(folder, flags.command) as cluster:
        run = Director(script, cluster, make_screen(console)).run()
    status = _report(console, run, report, folder)
    if workdir is None and status == 0:
        shutil.rmtree(folder)
    sys.exit(status)


def _prepare_folder(workdir: Path | None, report: Path) -> Path:
    """The folder for logs; what cannot be written is said before a minute is spent."""
    if not report.parent.is_dir():
        raise click.BadParameter(f"folder {report.parent} does not exist", param_hint="--report")
    if workdir is None:
        return Path(tempfile.mkdtemp(prefix="torchft-demo-"))
    workdir.mkdir(parents=True, exist_ok=True)
    if any(workdir.glob("group-*.jsonl")):
        raise click.BadParameter(f"{workdir} holds the events of a run", param_hint="--workdir")
    return workdir


def _report(console: Console, run: Run, picture: Path, folder: Path) -> int:
    """Print and write the report; the exit status."""
    verdicts = judge(run)
    print_report(console, run, verdicts)
    draw_picture(run.events, run.num_groups, picture)
    write_json(run, verdicts, picture.with_suffix(".json"))
    console.print(f"picture: {picture}", soft_wrap=True)
    return conclude(console, verdicts, folder, interrupted=run.interrupted)


if __name__ == "__main__":
    main()
