"""Makes the back end ``lighthouse`` known to torchrun, which loads this with all its back ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters


def get_handler_creator() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Return the function for the entry point in the group ``torchrun.handlers``."""
    return create_handler


def create_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Make a `LighthouseRendezvous`, which is imported when it is needed."""
    from torchft_svc.elastic.rendezvous.handler import rendezvous_at_lighthouse

    return rendezvous_at_lighthouse(params)
