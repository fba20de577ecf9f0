"""What TLS costs is measured with and without it; here once, and little of each."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import pytest


@pytest.mark.thorough
@pytest.mark.slow
def test_links_and_steps_with_and_without_tls() -> None:
    pytest.importorskip("cryptography", reason="needs certificates: cryptography isn't installed (make venv)")
    command = [sys.executable, "-m", "tools.evaluation.bench_tls", "--mib=2", "--repeats=1", "--steps=1"]
    done = subprocess.run(
        [*command, "--width=8", "--batch=8"], capture_output=True, text=True, cwd=pathlib.Path(__file__).parents[1]
    )
    assert done.returncode == 0, done.stderr
    number = r"[0-9.e+]+"
    for name, unit in (("link", "MiB/s"), ("step that sends 0.000244 MiB forward and as much backward", "ms")):
        for way in ("bare", "TLS"):
            assert re.search(rf"^{name}, {way}: median {number} {unit} \({number} to {number}\)$", done.stdout, re.M)
        assert re.search(rf"^{name}: TLS / bare {number}$", done.stdout, re.M)
