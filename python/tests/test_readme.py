"""The README's example, word for word."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_the_example_prints_what_the_page_says(tmp_path: Path) -> None:
    blocks = README.read_text().split("```")
    example = next(block.removeprefix("python\n") for block in blocks if block.startswith("python\n"))
    expected = next(block.removeprefix("text\n") for block in blocks if block.startswith("text\n"))
    done = subprocess.run([sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert (done.stdout, done.stderr) == (expected, "")
