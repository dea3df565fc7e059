"""What both services inside this process share."""

from __future__ import annotations

from typing import Any, TypeVar

from torchft_svc.host.loop import Background

Self = TypeVar("Self", bound="Server")


class Server:
    """A context manager that stops its service."""

    _running: Background[Any]

    def shutdown(self) -> None:
        """Stop serving, in good order; may be called twice."""
        self._running.close()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
