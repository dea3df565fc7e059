"""Which restarts get somewhere."""

from __future__ import annotations

import pytest

from torchft_svc.core.restart_progress import RestartProgress
from torchft_svc.errors import ConfigError


@pytest.mark.parametrize(
    ("steps", "limit", "expected"),
    [
        ([7, 7], 1, "1 restart has not got beyond step 7"),
        ([7, 7, 7], 2, "2 restarts in a row have not got beyond step 7"),
        ([7, 7, 8, 8, 8], 2, "2 restarts in a row have not got beyond step 8"),
        ([7, 5, 6], 2, "2 restarts in a row have not got beyond step 7"),  # from a checkpoint
        ([7, 7, 8, 8, 9], 2, ""),
        ([7, 7], 2, ""),
        ([7] * 9, None, ""),
        ([None] * 9, 1, ""),  # they report none
        ([7, None, 7], 1, "1 restart has not got beyond step 7"),
    ],
)
def test_restarts_in_a_row_without_a_new_step_are_counted(
    steps: list[int | None], limit: int | None, expected: str
) -> None:
    progress = RestartProgress(limit)
    *before, last = [progress.record_failure(step) for step in steps]
    assert not any(before)
    assert last == expected


def test_no_restart_at_all_is_no_limit_on_them() -> None:
    with pytest.raises(ConfigError, match="max_restarts_without_progress=0"):
        RestartProgress(0)
