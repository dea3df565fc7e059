"""`torchft.parameter_server`: a server for tensors whose clients come and go."""

from __future__ import annotations

from torchft_svc.client.parameter_server.server import ParameterServer as NativeServer
from torchft_svc.client.parameter_server.session import SessionGroup
from torchft_svc.client.process_groups.base import ProcessGroup
from torchft_svc.compat.errors import public_errors
from torchft_svc.compat.process_group import Abortable
from torchft_svc.compat.process_group import ProcessGroup as PublicProcessGroup


class PublicSessionGroup(Abortable, SessionGroup, PublicProcessGroup):
    """A session with the methods that process groups have in the public release."""


class ParameterServer(NativeServer):
    """The native server; a subclass has `new_process_group` and `forward`."""

    _group_class = PublicSessionGroup

    def __init__(self, port: int, store_port: int = 0) -> None:
        super().__init__(port, store_port)

    @classmethod
    def new_session(cls, address: str) -> ProcessGroup:  # type: ignore[override]
        """Begin a session with the server at ``address``; the server is rank 0, the client rank 1.

        Raises:
            RuntimeError, TimeoutError: the server cannot be reached, or is gone.
        """
        with public_errors():
            return super().new_session(address)
