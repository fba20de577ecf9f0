"""Memory that isn't used any more goes back to the kernel."""

from __future__ import annotations

import subprocess
import sys

from workers import environment

FREED = """
import os
from dapple_tf.garbage import return_freed_memory

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

pieces = [bytes(2000) for _ in range(32_000)]  # 64 MB, too small for a mapping each, too large for Python's own pools
del pieces[:-1]  # the last one keeps the C library from giving back what is below it
before = resident()
return_freed_memory()
print(before - resident())
"""


def test_what_has_been_freed_goes_back() -> None:
    done = subprocess.run([sys.executable, "-c", FREED], env=environment(), capture_output=True, text=True, check=True)
    assert int(done.stdout) > 32_000_000
