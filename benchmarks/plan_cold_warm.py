"""Cold against warm `plan` of a 70B step on 1024 cores, whole processes, as a ratio in one run.

Bars (DESIGN.md section 7): cold within 12 s and 2 GB, warm at least 20 times faster.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time

COMMAND = ["-m", "orchestrator", "plan", "--model", "llama2-70b", "--instances", "32", "--json"]


def seconds(cache: str) -> float:
    start = time.perf_counter()
    environment = {**os.environ, "NEURON_COMPILE_CACHE_URL": cache}
    done = subprocess.run(
        [sys.executable, *COMMAND], env=environment, capture_output=True, check=False
    )
    if done.returncode not in (0, 71):
        sys.exit(done.stderr.decode())
    return time.perf_counter() - start


def main() -> None:
    with tempfile.TemporaryDirectory() as cache:
        cold, warm = seconds(cache), seconds(cache)
    peak_gb = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 1e9
    print(f"cold {cold:.2f} s, warm {warm:.2f} s, ratio {cold / warm:.1f}, peak {peak_gb:.2f} GB")


if __name__ == "__main__":
    main()
