"""The Triton backends without a GPU: Triton's interpreter runs the battery and the public faults on the CPU.

The interpreter is chosen when the kernels are imported, so it gets a process of its own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
#: Fewer than all that must have run, so that a selection that matches nothing cannot pass.
LEAST = 100


@pytest.mark.timeout(900)
@pytest.mark.parametrize("backend", ["triton", "chain"])
def test_battery_and_public_faults(backend: str) -> None:
    command = [sys.executable, "-m", "pytest", "-m", "not gpu", "-k", f"{backend}-cpu", "-p", "no:cacheprovider"]
    command += [
        "tests/cases",
        "tests/test_fuzz.py",
        "tests/test_extremes.py",
        "tests/kernels/test_every_backend.py",
        "tests/kernels/test_chain.py",
    ]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None, done.stdout
    assert int(passed[1]) >= LEAST
