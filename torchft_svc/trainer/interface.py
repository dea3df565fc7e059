"""Finds the network interface over which the other workers reach this one."""

from __future__ import annotations

from torchft_svc import env
from torchft_svc.host.interfaces import interface_of


def use_interface_of(host: str) -> None:
    """Make gloo use the interface with the address ``host``, unless the user has chosen one.

    By itself it asks for the address of the host's name, which many systems answer with 127.0.0.1:
    workers on two machines then never meet.
    """
    interface = interface_of(host)
    if interface is not None and not interface.is_loopback:
        env.set_default("GLOO_SOCKET_IFNAME", interface.name)
