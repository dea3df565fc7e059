"""What a trainer says on stderr, unless its program has set up logging itself."""

from __future__ import annotations

import logging

from torchft_svc.rpc.log_limit import LimitedLog, level_number, line_formatter

_PACKAGE = "torchft_svc"


class TrainerLog(LimitedLog):
    """The package's lines on stderr, until the program sets up logging: then it gives way for good.

    ``who`` is the replica group, as the lines name it.
    """

    def __init__(self, level: int, who: str) -> None:
        super().__init__()
        self._level = level
        self._who = who
        self.setFormatter(line_formatter(who))

    def name_group(self, who: str) -> None:
        """There is a manager of ``who``, too: with another name the lines name none."""
        if who != self._who:
            self.setFormatter(line_formatter(""))

    def begin(self) -> None:
        """Take the package's lines, and keep them from the root logger, whose level is another."""
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
            # Who calls this goes on with the handlers of the old list, and then to the root logger.
            package.handlers = others
            package.propagate = True


def speak_on_stderr(level: str, who: str) -> None:
    """Show the package's lines of ``level`` and above, with time and level, one line each.

    A program that has set up logging (its root logger, or this package's, has handlers) has decided
    where its lines go; nothing is changed then.
    """
    package = logging.getLogger(_PACKAGE)
    for handler in package.handlers:
        if isinstance(handler, TrainerLog):
            handler.name_group(who)
    if package.handlers or logging.root.handlers or not package.propagate:
        return
    TrainerLog(level_number(level), who).begin()
