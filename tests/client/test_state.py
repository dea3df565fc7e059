"""What a state may hold is found out before anybody needs it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from torchft_svc.client import CheckpointTransport, HTTPTransport, PGTransport, ProcessGroupGloo
from torchft_svc.errors import ConfigError

from .training import TIMEOUT, Trainer, lighthouse


@pytest.fixture
def address() -> Iterator[str]:
    with lighthouse() as address:
        yield address


@pytest.fixture(params=["http", "pg"])
def options(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """Those of a manager, for either transport."""
    group = ProcessGroupGloo(TIMEOUT)
    transport: CheckpointTransport[Any] = PGTransport(group, TIMEOUT)
    if request.param == "http":
        transport = HTTPTransport(TIMEOUT, hostname="127.0.0.1")
    yield {"pg": group, "checkpoint_transport": transport}
    transport.shutdown()
    group.shutdown()


class Unknown:
    """Nothing that can be sent."""


def test_a_state_that_cannot_be_sent_is_refused_when_the_manager_starts(
    address: str, options: dict[str, Any]
) -> None:
    def save() -> Any:
        return {"optim": {"hook": Unknown()}}

    with pytest.raises(ConfigError, match=r"state_dict\['default'\]\['optim'\]\['hook'\].*Unknown"):
        Trainer(address, "a", 0, state_dict=save, **options)


def test_a_state_that_cannot_be_sent_is_refused_when_it_is_registered(
    address: str, options: dict[str, Any]
) -> None:
    with Trainer(address, "a", 0, **options) as trainer:
        with pytest.raises(ConfigError, match=r"state_dict\['more'\]\[0\].*Unknown"):
            trainer.manager.register_state_dict_fn("more", lambda _: None, lambda: [Unknown()])
        assert trainer.step()  # as if it had not been tried


def test_a_state_that_is_not_there_yet_is_looked_at_in_the_first_step_of_a_group_alone(
    address: str, options: dict[str, Any]
) -> None:
    made: dict[str, Any] = {}
    with Trainer(address, "a", 0, **options) as trainer:
        trainer.manager.register_state_dict_fn("later", made.update, lambda: {"x": made["later"]})
        made["later"] = Unknown()
        with pytest.raises(ConfigError, match=r"\['later'\]\['x'\].*Unknown"):
            trainer.step()
