"""A compile actor that dies on request, in a module that Ray's workers can import."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from orchestrator.executor import Outcome, WorkUnit
from orchestrator.ray_backend import CompileActor

PREFIX = "die "


class DyingActor(CompileActor):
    """Kills its own process in the middle of a unit named "die N FOLDER", the first N times.

    Every start of such a unit leaves a file in the folder. Other units run as always.
    """

    def run(self, unit: WorkUnit) -> Outcome:
        """See CompileActor."""
        if unit.name.startswith(PREFIX):
            _, times, folder = unit.name.split(" ", 2)
            starts = len(list(Path(folder).iterdir()))
            (Path(folder) / f"start-{starts}").touch()
            if starts < int(times):
                time.sleep(0.05)
                os.kill(os.getpid(), signal.SIGKILL)
        return super().run(unit)
