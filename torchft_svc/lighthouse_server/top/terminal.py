"""Shows a feed in a terminal until somebody quits, and leaves the terminal as it was."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.live import Live

from torchft_svc import env
from torchft_svc.lighthouse_server.top.feed import Answer, StatusFeed, View
from torchft_svc.lighthouse_server.top.screen import Selection, draw_screen

# How often ages and the clock are drawn, and a new size of the window is noticed.
REDRAW_S = 0.25
_UP, _DOWN = (b"\x1b[A", b"\x1bOA", b"k"), (b"\x1b[B", b"\x1bOB", b"j")
_PAGE_UP, _PAGE_DOWN = (b"\x1b[5~",), (b"\x1b[6~", b" ")
_PAGE_ROWS = 10
_SCROLLING = (
    (_UP, -1),
    (_DOWN, 1),
    (_PAGE_UP, -_PAGE_ROWS),
    (_PAGE_DOWN, _PAGE_ROWS),
)
# The lines of the one frame, which no window limits.
ONCE_ROWS = 60


class Quit(Exception):
    """The user has asked for the end."""


def handle_keys(keys: bytes, selection: Selection) -> None:
    """Carry out the keys that were pressed; sequences of unknown keys are ignored.

    Raises:
        Quit: one of them was ``q`` or Ctrl-C.
    """
    while keys:
        for found, rows in _SCROLLING:
            known = next((each for each in found if keys.startswith(each)), None)
            if known is not None:
                selection.scroll_groups(rows)
                keys = keys[len(known) :]
                break
        else:
            if keys[:1] in (b"q", b"Q", b"\x03"):
                raise Quit
            if keys[:1] == b"\t":
                selection.choose_next_job()
            keys = b"" if keys[:1] == b"\x1b" else keys[1:]


def show_live(make_feed: Callable[[Callable[[], None]], StatusFeed], where: str) -> None:
    """Draw what the feed has until `Quit`, Ctrl-C, SIGTERM or SIGHUP.

    ``make_feed`` receives what wakes the screen.
    """
    console, selection = Console(_environ=env.without_window_size()), Selection()
    awake, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, awake)
        stack.callback(os.close, wake)

        def wake_up() -> None:
            with contextlib.suppress(BlockingIOError, OSError):
                os.write(wake, b"x")

        stack.enter_context(_ending_by_signals())
        feed = stack.enter_context(make_feed(wake_up))
        stack.enter_context(_reading_keys())
        live = stack.enter_context(Live(console=console, screen=True, auto_refresh=False))
        watched = [awake, *([sys.stdin.fileno()] if sys.stdin.isatty() else [])]
        with contextlib.suppress(Quit, KeyboardInterrupt):
            while True:
                width, height = console.size
                live.update(draw_screen(feed.view, selection, where, width, height), refresh=True)
                feed.chosen_job = selection.job_name
                readable, _, _ = select.select(watched, [], [], REDRAW_S)
                if awake in readable:
                    os.read(awake, 1000)
                if len(readable) > (awake in readable):
                    keys = os.read(sys.stdin.fileno(), 1000)
                    if not keys:
                        return  # the terminal is gone
                    handle_keys(keys, selection)


def show_once(answer: Answer, where: str) -> None:
    """Print one frame, for a pipe or a terminal."""
    console = Console()
    view = View(answer=answer, answered_at=time.monotonic())
    frame = draw_screen(view, Selection(), where, console.size.width, ONCE_ROWS, keys=False)
    console.print(frame)


@contextlib.contextmanager
def _reading_keys() -> Iterator[None]:
    """Keys arrive at once and are not shown; afterwards the terminal is as it was."""
    if not sys.stdin.isatty():
        yield
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor, termios.TCSANOW)
        # Ctrl-Z would leave the shell on the other screen.
        changed = termios.tcgetattr(descriptor)
        changed[6][termios.VSUSP] = b"\x00"
        termios.tcsetattr(descriptor, termios.TCSANOW, changed)
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSANOW, before)


@contextlib.contextmanager
def _ending_by_signals() -> Iterator[None]:
    """Raise SystemExit on SIGTERM and SIGHUP, so that the blocks around the screen are left."""

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = {each: signal.signal(each, end) for each in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
