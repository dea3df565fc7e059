"""Turns errors of this package into those that programs for the public release catch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torchft_svc.errors import TorchFTError


@contextlib.contextmanager
def public_errors() -> Iterator[None]:
    """Raise RuntimeError where the block raises an error of this package.

    A TimeoutError and a ValueError stay what they are, as they are in the public release.
    """
    try:
        yield
    except (TimeoutError, ValueError):
        raise
    except TorchFTError as error:
        raise RuntimeError(str(error)) from error
