"""Tests that a group which was lost is met again; what a loss means decides `core/peers.py`."""

from __future__ import annotations

from support.training import lighthouse, together, trainers


def test_a_group_whose_session_broke_is_met_again() -> None:
    """Same incarnation: it was only cut off, so the news of its loss is about an earlier quorum."""
    with lighthouse(min_replicas=2) as address, trainers(address, 2) as (a, b):
        assert together(a.step, b.step) == [True, True]
        quorum = a.manager.last_quorum()
        assert quorum is not None
        others = [
            name for rank, name in enumerate(quorum.replica_ids) if rank != quorum.replica_rank
        ]
        a.manager._worker.lose(others[0], "its session ended", quorum.quorum_id)

        def fails() -> bool:
            a.backward()
            a.manager.report_error(RuntimeError("so the next quorum has another id"))
            return a.optimizer.step()

        together(fails, b.step)
        outcomes = [together(a.step, b.step) for _ in range(3)]
        assert outcomes[-1] == [True, True], outcomes
        later = a.manager.last_quorum()
        assert later is not None
        assert later.quorum_id > quorum.quorum_id
