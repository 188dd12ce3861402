"""What every file of a dump is, by the name of its step.

Graph rewrites are described where `opt` finds them, everything else here. A note has its own
meaning in each part of a dump: the memory of a step, of a program, and of a function.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from shardwright.orchestrator.opt.registry import REWRITES

FILES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "": {
            "captured": "the step as it was captured: StableHLO with the places of the source",
            "roles": "what every input and result of the step is: role, name, type",
            "imported": "the same graph in the form of this compiler",
            "repeats": "which layers became loops, and inputs and results as they are now",
            "decisions": "who decided where every leaf lives, and which collectives are expected",
            "shardy_input": "what the partitioner (Shardy) gets: StableHLO with shardings",
            "plan": "mesh, schedule, buffers of a core, streams of collectives, messages",
            "memory": "LIVENESS of the whole step: what a core holds, program by program",
            "time": "OVERLAP of the whole step: where time goes, and what hides behind what",
            "set_aside": "why what was made so far is not used; the step is captured again",
        },
        "proof": {},
        "programs": {
            "memory": "LIVENESS of the arena: calls in order, and when buffers are in use",
            "listing": "the linked program: buffers, calls, and where the code of functions is",
        },
        "functions": {
            "fusion": "which operators share a kernel, what that saves, which merges were refused",
            "kernels": "what each kernel computes: the text of kernel programs",
            "tiling": "TILING: iteration dims, tiles, loops, and what they were chosen from",
            "memory": "LIVENESS of tensors between kernels, and the scratch zone",
            "overlap": "OVERLAP: what every engine does when; collectives and what runs beside",
            "listing": "the code: every instruction with its waits and signals",
            "chosen": "the code of the level asked for beside that of the default: who won",
            "refused": "why the function cannot be compiled",
        },
    }
)

README = """\
A dump of every stage of a job, in the order in which they were made.

How to find things
  - Files of this folder are the whole step, from the captured text to the plan of a core.
  - programs/NAME are the programs that the step is cut into (forward, backward, update;
    backward.first and backward.last where the last micro-batch reduces for all).
  - functions/NAME are the distinct functions of all programs, each once, whoever calls it;
    programs/NAME/*-listing.txt says which functions it calls, and in which order.
  - Numbers count steps within a folder. A step that changed nothing has no file: the graph is that
    of the file before it.
  - Graphs and kernels are texts that `shardwright opt` reads back (docs/text-forms.md); comments
    (`//`) say where values live.

Where to read
  tiling     functions/NAME/*-tiling.txt
  liveness   *-memory.txt here (a core, over the step), programs/NAME/*-memory.txt (between
             functions), functions/NAME/*-memory.txt (between kernels), tiles: *-tiling.txt
  overlap    functions/NAME/*-overlap.txt (engines, and collectives beside them), *-time.txt here
             (what is hidden in the end); programs/NAME: graphs behind `grouped`, `bucketed`,
             `shifted` and `prioritised` are those with layers moved

Files
"""


def about(folder: str, name: str) -> str:
    """What the file of a step is; nothing for a name that is not known."""
    part = folder.partition("/")[0]
    rewrite = REWRITES.get(name)
    text = rewrite.help if rewrite else FILES[part].get(name) or FILES[""].get(name, "")
    more = " (with more samples: what micro-batches are proven by)"
    return f"{text}{more}" if text and part == "proof" else text
