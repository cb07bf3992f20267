"""Signals that ask a process to end. Python handles only that of Ctrl-C: at the others it ends where it is."""

from __future__ import annotations

import signal
from types import FrameType


def end_in_order() -> None:
    """Lets such a signal raise :class:`SystemExit`, so that what was begun is undone on the way out."""
    for name in ("SIGHUP", "SIGTERM"):
        number = getattr(signal, name, None)
        # One that is ignored stays so, as under nohup.
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _end)


def _end(number: int, _: FrameType | None) -> None:
    # Another one does not disturb the way out.
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(128 + number)
