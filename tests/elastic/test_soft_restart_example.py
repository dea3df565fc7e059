"""Tests the example: workers keep their process and their step in one world after the other, and
the bits of their models are equal after each change. Agents are faked here."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.fake_agents import FakeAgents
from support.soft_restarts import EXAMPLE, live_through_every_change

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("group", ["torch", "gloo"])
def test_workers_live_through_every_change(tmp_path: Path, group: str) -> None:
    with FakeAgents(tmp_path) as agents:
        live_through_every_change(agents, EXAMPLE, "--group", group)
