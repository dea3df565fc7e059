"""Tests the news of a loss: it counts for the quorum that it belongs to, and for no later one."""

from __future__ import annotations

from .training import lighthouse, together, trainers


def test_a_group_whose_session_broke_is_met_again() -> None:
    """Same incarnation: it was only cut off, so the news of its loss is about an earlier quorum."""
    with lighthouse(min_replicas=2) as address, trainers(address, 2) as (a, b):
        assert together(a.step, b.step) == [True, True]
        membership = a.manager._runtime.membership
        assert membership.quorum is not None
        quorum = membership.quorum
        others = [
            name for rank, name in enumerate(quorum.replica_ids) if rank != quorum.replica_rank
        ]
        membership.lose(others[0], "its session ended")

        def fails() -> bool:
            a.backward()
            a.manager.report_error(RuntimeError("so the next quorum has another id"))
            return a.optimizer.step()

        together(fails, b.step)
        outcomes = [together(a.step, b.step) for _ in range(3)]
        assert outcomes[-1] == [True, True], outcomes
        assert membership.quorum.quorum_id > quorum.quorum_id
