"""The log of a trainer on stderr, unless its program configures logging itself."""

from __future__ import annotations

import logging

from torchft_svc.host.log_limit import LimitedLog, level_number, line_formatter

_PACKAGE = "torchft_svc"


class TrainerLog(LimitedLog):
    """Writes the package's lines to stderr, until the program configures logging.

    ``who`` is the name of the replica group in the lines.
    """

    def __init__(self, level: int, who: str) -> None:
        super().__init__()
        self._level = level
        self._who = who
        self.setFormatter(line_formatter(who))

    def name_group(self, who: str) -> None:
        """Name no group in the lines if another manager, of ``who``, has another name."""
        if who != self._who:
            self.setFormatter(line_formatter(""))

    def attach(self) -> None:
        """Handle the package's lines, and do not propagate them to the root logger."""
        package = logging.getLogger(_PACKAGE)
        if package.level == logging.NOTSET:
            package.setLevel(self._level)
        package.addHandler(self)
        package.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        package = logging.getLogger(_PACKAGE)
        others = [handler for handler in package.handlers if handler is not self]
        if not others and not logging.root.handlers:
            super().emit(record)
            return
        if package.level == self._level:
            package.setLevel(logging.NOTSET)
        if logging.getLogger(record.name).isEnabledFor(record.levelno):
            # The caller continues with the handlers of the old list, and then with the root logger.
            package.handlers = others
            package.propagate = True


def speak_on_stderr(level: str, who: str) -> None:
    """Write the package's lines of ``level`` and above to stderr.

    Does nothing if the program has configured logging (the root logger, or this package's, has
    handlers).
    """
    package = logging.getLogger(_PACKAGE)
    for handler in package.handlers:
        if isinstance(handler, TrainerLog):
            handler.name_group(who)
    if package.handlers or logging.root.handlers or not package.propagate:
        return
    TrainerLog(level_number(level), who).attach()
