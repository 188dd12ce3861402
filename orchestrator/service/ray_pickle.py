"""Objects of a user's script in another process: what is defined in the script itself, a notebook
or a prompt goes by value, the rest by its name (cloudpickle, which Ray brings)."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def write(path: Path, found: Any) -> None:
    """Write an object for `read`. Raises what its classes raise."""
    from ray import cloudpickle

    path.write_bytes(cloudpickle.dumps(found))


def read(path: Path) -> Any:
    """The object of a file that this program wrote: reading runs code of the file."""
    from ray import cloudpickle

    return cloudpickle.loads(path.read_bytes())
