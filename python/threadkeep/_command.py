"""The command ``threadkeep``: the program in the wheel, and ``threadkeep import-langgraph``, which needs Python."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main() -> None:
    """Runs the command with the arguments of this process."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["import-langgraph"]:
        from threadkeep.langgraph._moving import main as move

        sys.exit(move(arguments[1:]))
    program = os.environ.get("THREADKEEP_BINARY") or str(Path(__file__).parent / "bin" / "threadkeep")
    if not Path(program).exists():
        sys.exit(f"this package was built without the program threadkeep ({program} is missing): build it with make wheel")
    os.execv(program, ["threadkeep", *arguments])
