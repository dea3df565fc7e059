"""Options that several benchmarks have."""

from __future__ import annotations

from pathlib import Path

import click

from tools.benchmarks.children.healing_ends import MATRIX_BYTES

json_option = click.option(
    "--json",
    "json_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the result here, too.",
)
before_option = click.option(
    "--before",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Another checkout of this project (git worktree add FOLDER COMMIT): its package is "
    "measured beside this one, in turns.",
)
gb_option = click.option(
    "--gb", type=click.FloatRange(0.07), default=2.0, help="Size of the state in GiB."
)


def num_matrices_in(gb: float) -> int:
    """How many matrices a state of ``gb`` GiB has."""
    return max(1, int(gb * (1 << 30)) // MATRIX_BYTES)
