"""Reads the small files that settings name, and secrets; each error names the setting."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torchft_svc.errors import ConfigError

# Certificate bundles are some 200 KB; more is not one.
MAX_FILE_BYTES = 4 << 20


def read_file(name: str, path: str) -> bytes:
    """The content of the file at ``path``, which setting ``name`` holds.

    Raises:
        ConfigError: it cannot be read, or has more than `MAX_FILE_BYTES`.
    """
    if not path.strip():
        raise ConfigError(name, path, "it is empty: name a file, or leave it out")
    try:
        with Path(path).open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:  # a path with a null byte is a ValueError
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(name, path, f"it cannot be read: {reason}") from None
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(name, path, f"it has more than {MAX_FILE_BYTES} bytes")
    return content


def read_secret(
    name: str,
    value: str | None,
    file_setting: str | None,
    file_argument: str | None,
    flaw: Callable[[str], str | None] = lambda secret: None,
) -> str | None:
    """A secret: of the file of the command line, else ``value`` or the file of the environment.

    ``name`` is the environment variable of the secret itself; ``{name}_FILE`` names its file.
    ``flaw`` says what is wrong with a secret, if anything is; it must not quote it.

    Raises:
        ConfigError: the file cannot be read, is not text, is empty or holds a secret with a flaw;
            or the environment has both.
    """
    file_name = f"{name}_FILE"
    if file_argument is None and value is not None:
        if file_setting is not None:
            raise ConfigError(file_name, file_setting, f"{name} is set too: leave out one")
        return value
    path = file_setting if file_argument is None else file_argument
    if path is None:
        return None
    try:
        secret = read_file(file_name, path).decode().strip()
    except UnicodeDecodeError:
        raise ConfigError(file_name, path, "the file holds no text (UTF-8)") from None
    wrong = flaw(secret) if secret else "the file is empty"
    if wrong is not None:
        raise ConfigError(file_name, path, wrong)
    return secret
