"""Which quorum ids a lighthouse issues, and which reported ids it believes (rule Q6)."""

from __future__ import annotations

from torchft_svc.errors import RequestRefused

# Ids follow the clock. A reported id that nobody can have issued yet is refused: otherwise the job
# would run out of ids, and the next lighthouse would refuse its groups. Clocks differ, by up to 14
# hours with another time zone; a job that is new here may come from a lighthouse that was already
# ahead.
MAX_AHEAD_S, MAX_AHEAD_OF_NEW_JOB_S = 15 * 3600.0, 30 * 3600.0


class QuorumIds:
    """``first`` must be above any id of an earlier lighthouse.

    Ids grow by ``stride``; lighthouses with other remainders issue other ids. ``per_s``: by how
    much the first id of a lighthouse grows as it starts later than ``now``.
    """

    def __init__(self, first: int, stride: int, per_s: float, now: float) -> None:
        self.first = first  # of jobs that nothing is known of
        self._base, self._per_s, self._began_at = first, per_s, now
        self._stride, self._remainder = stride, first % stride

    def next(self, known: int) -> int:
        return known + self._stride - (known - self._remainder) % self._stride

    def check_told(self, told: int, known: int, now: float, *, is_running: bool) -> None:
        """Refuse an id that cannot have been issued.

        ``known``: the highest id of its job; ``is_running``: the job has a quorum here.
        """
        is_clock_unset = self._base < self._stride  # it says a time before all ids
        if told <= max(self._base, known) or is_clock_unset:
            return
        ahead_s = (told - self._base) / self._per_s - (now - self._began_at)
        if ahead_s > (MAX_AHEAD_S if is_running else MAX_AHEAD_OF_NEW_JOB_S):
            raise RequestRefused(
                f"quorum {told}, which a group reported, was never issued: it is "
                f"{ahead_s / 3600:.0f} h ahead of this lighthouse's clock; set the clocks, and "
                "restart that group"
            )

    def forget(self, last: int, now: float) -> None:
        """A job whose last id was ``last`` is forgotten, and may start again.

        Issued ids are below the clock; a reported one may not be, and must not move the ids of
        other jobs.
        """
        clock_id = self._base + int(self._per_s * (now - self._began_at))
        self.first = max(self.first, min(last, clock_id))
