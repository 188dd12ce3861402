"""`ray submit cluster.yaml scripts/ray_submit.py -- WORDS`: `shardwright WORDS` on the head.

`ray submit` copies this one file to the head's home directory and starts it with the system's
Python. The checkout is there already (`file_mounts` of cluster.yaml), with an environment that has
Ray; this starts the command in both, on the cluster, with the cluster's token. Standard library
only.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def main(words: list[str]) -> int:
    """Run the command; its exit code, also in words: `ray submit` returns 1 for any failure."""
    checkout = Path(os.environ.get("SHARDWRIGHT_HOME") or "~/shardwright").expanduser()
    python = checkout / ".venv" / "bin" / "python"
    token = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.shardwright/token").expanduser()
    missing = [str(path) for path in (python, token) if not path.exists()]
    if missing or not words:
        print("usage: ray submit cluster.yaml scripts/ray_submit.py -- run JOB.toml ...")
        for path in missing:
            print(f"not on the head: {path}; `ray up cluster.yaml` puts it there")
        return 2
    environment = {
        **os.environ,
        "PATH": f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "RAY_ADDRESS": "auto",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
    }
    command = [str(python), "-m", "shardwright", *words]
    code = subprocess.run(command, cwd=checkout, env=environment, check=False).returncode
    print(f"shardwright {words[0]}: exit code {code}", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
