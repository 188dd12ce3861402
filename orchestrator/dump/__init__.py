"""`--dump-dir`: every stage of a job as numbered, named files that people read."""

from __future__ import annotations

from shardwright.orchestrator.dump.folder import FLAG, Dump, dumping

__all__ = ["FLAG", "Dump", "dumping"]
