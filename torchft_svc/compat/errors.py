"""Turns errors of this package into those that programs for the public release catch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torchft_svc.errors import PeerError, TorchFTError


class PublicPeerError(PeerError, RuntimeError):
    """A failure of a peer or the network, for programs that catch RuntimeError.

    The native algorithms, which a program may use with the manager of this package, go on after a
    PeerError.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


@contextlib.contextmanager
def public_errors() -> Iterator[None]:
    """Raise RuntimeError where the block raises an error of this package.

    A TimeoutError and a ValueError stay what they are, as they are in the public release.
    """
    try:
        yield
    except (TimeoutError, ValueError):
        raise
    except PeerError as error:
        raise PublicPeerError(str(error)) from error
    except TorchFTError as error:
        raise RuntimeError(str(error)) from error
