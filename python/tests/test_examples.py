"""The examples run, and print what they should."""

from __future__ import annotations

import doctest
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from threadkeep.langgraph import _saver, _sqlite

APPROVAL = Path(__file__).parent.parent / "examples" / "approval.py"


def run(path: Path) -> list[str]:
    done = subprocess.run([sys.executable, str(APPROVAL), str(path)], capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout.splitlines()


def test_the_desk_asks_goes_on_in_another_process_and_goes_back(tmp_path: Path) -> None:
    path = tmp_path / "checkpoints.db"
    assert run(path) == ["asks: Buy desk and lamp for 340?", "Run it again to answer."]
    continued = run(path)
    assert continued[:4] == ["continues: Buy desk and lamp for 340?", "yes: Bought for 340.", "no: Then not.", "orders: 0"]
    assert continued[4].endswith(" checkpoints, after pruning 1")


@pytest.mark.parametrize("module", [_saver, _sqlite])
def test_the_examples_in_docstrings_show_what_they_say(module: ModuleType) -> None:
    done = doctest.testmod(module)
    assert done.attempted > 0 and done.failed == 0, "what failed is in the output"
