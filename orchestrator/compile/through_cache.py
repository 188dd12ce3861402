"""A model file whose functions are compiled through the cache: what any file, job or script of this
host has compiled before is not compiled again.

Stages of what the cache had cannot be written, so `--dump-dir` and `SaveTemps` go without it.
"""

from __future__ import annotations

import time

from shardwright.compiler.driver import link_outlined
from shardwright.compiler.isa.program import Program
from shardwright.compiler.outline import outline_programs
from shardwright.compiler.outline.unit import unpack_function
from shardwright.compiler.surface.resolve import Command, Resolved
from shardwright.orchestrator.cache import Cache, open_cache
from shardwright.orchestrator.cache.location import locate
from shardwright.orchestrator.compile.compile_log import CompileLog
from shardwright.orchestrator.compile.modules import Maker, OpenModule
from shardwright.orchestrator.config.config import CacheConfig
from shardwright.orchestrator.environment.reading import said
from shardwright.orchestrator.host import num_cpus
from shardwright.orchestrator.road.parts import parts_of
from shardwright.orchestrator.road.units import refused_kinds
from shardwright.orchestrator.service.executor import Executor, InlineExecutor, Start
from shardwright.orchestrator.service.service import UnitService


def is_cached(command: Command) -> bool:
    """Whether the cache takes part in a compilation."""
    return not (command.no_cache or command.dump_dir or command.save_temps)


def through_cache(command: Command) -> Maker:
    """What compiles a program whose functions come from the cache, where it has them. It raises
    DiagnosticError, also one that the cache remembers."""
    cache, place = _opened(command)
    found_miss = said("VLLM_NEURON_DISABLE_WARMUP_COMPILE")
    refused = refused_kinds(CacheConfig(miss=found_miss.of_job)) if found_miss else ()

    def make(opened: OpenModule, resolved: Resolved, log: CompileLog) -> Program:
        with UnitService(_started(command), cache, refused=refused) as service:
            outlined = outline_programs((opened.program,))
            opened.watch.outlined(outlined)
            parts = parts_of(outlined, command.target.name, resolved.options)
            functions = map(unpack_function, parts.compiled(service.settle(parts.units)))
            program = link_outlined(outlined, functions, parts.target, opened.watch)
            found = sum(row.cache == "hit" for row in service.rows)
            log.say("info", f"{found} of {len(service.rows)} functions from the cache, {place}")
            for finding in service.findings:
                log.say(finding.severity, finding.message)
        return program

    return make


def _started(command: Command) -> Start:
    """What compiles functions: this process, or as many as --num-parallel-jobs says, where several
    wait and the host has as many CPUs."""
    jobs = min(command.num_parallel_jobs, num_cpus())
    if jobs == 1:
        return InlineExecutor

    def start() -> Executor:
        from shardwright.orchestrator.service.process_backend import AutoExecutor

        return AutoExecutor(jobs)

    return start


def _opened(command: Command) -> tuple[Cache, str]:
    """The cache that the flags name, else that of jobs, and where it is. A retry asks
    what failed anew, and nothing else. Raises UsageError for no place."""
    source = "--cache_dir" if command.cache_dir else ""
    place = locate(command.cache_dir, source=source) if source else locate()
    again_s = time.time() if command.retry_failed_compilation else 0.0
    return open_cache(CacheConfig(dir=command.cache_dir, failed_since_s=again_s)), str(place)
