"""What a PyTorch user's code says about distribution, read by running it on one process.

Under `reading()` the names that shard a module (`fully_shard`, `parallelize_module`, `FSDP`, DDP,
`checkpoint_wrapper`, `pipeline` ...) are recorders: they note what was asked, at the user's line,
and hand the module back as it was. No process group is made; torch.distributed answers as rank 0.
Afterwards every name is what it was, and a recorder that the user's file still holds calls what it
stood for.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from shardwright.compiler.frontend.locations import LocationReader
from shardwright.compiler.frontend.pytorch.recorders import patched
from shardwright.compiler.frontend.pytorch.recording import Recording

_active: Recording | None = None


def active() -> Recording | None:
    """The reading that is going on."""
    return _active


@contextmanager
def reading(
    world_size: int = 0, base_dir: str | None = None, *, loads: bool = True
) -> Iterator[Recording]:
    """Run code of the user's inside, from the import of its file on, then ask the `Recording` for
    its `distribution(model)`. `world_size` 0 is that of the environment, or one rank; paths are
    relative to `base_dir`; without what it `loads`, names of modules of torch's that nobody has
    imported yet stay as they are.

    Raises: ModuleNotFoundError without torch; UsageError where the code says what cannot be
    (SW_TORCH_MESH, SW_TORCH_UNITS, SW_TORCH_PLAN, SW_TORCH_SPLIT).
    """
    global _active
    ranks = world_size or int(os.environ.get("WORLD_SIZE") or 1)
    recording = Recording(ranks, LocationReader(base_dir))
    before = _active
    with ExitStack() as undo:
        undo.callback(recording.close)
        undo.enter_context(_environment(ranks))
        undo.enter_context(patched(active, loads))
        _active = recording
        try:
            yield recording
        finally:
            _active = before


class Undistributed:
    """A function that makes a module, called on one process whatever it says of distribution.

    `recording` is what it said when it was called last.
    """

    def __init__(self, function: Callable[..., Any], base_dir: str, world_size: int) -> None:
        functools.update_wrapper(self, function, updated=())
        self.function, self.base_dir, self.world_size = function, base_dir, world_size
        self.recording: Recording | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the function returns."""
        loads = _names_distribution(self.function)
        with reading(self.world_size, self.base_dir, loads=loads) as self.recording:
            return self.function(*args, **kwargs)


def _names_distribution(function: Callable[..., Any]) -> bool:
    """Whether the file of a function names torch.distributed, which it may import later."""
    file = getattr(sys.modules.get(function.__module__), "__file__", None)
    return bool(file) and b"torch.distributed" in Path(str(file)).read_bytes()


@contextmanager
def _environment(ranks: int) -> Iterator[None]:
    """What torchrun tells rank 0 of one host."""
    told = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",
    }
    before = {name: os.environ.get(name) for name in told}
    os.environ.update(told)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
