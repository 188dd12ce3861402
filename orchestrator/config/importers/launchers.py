"""The words of a command that starts ranks, as flags: those of its launchers, then the script's.

A launcher's options end where the name of the script begins, whatever they are written like:
`srun -N 4 torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 32`. Sources: the manuals of
`torch.distributed.run`, deepspeed, srun and mpirun (Open MPI).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

FLAG = re.compile(r"--[A-Za-z]")
_SHORT = re.compile(r"-([A-Za-z]+)(\d*)")
_ENDS = re.compile(r"\d*>|[|&;]")  # what a shell reads as the end of a command or of its words
_PROGRAM = re.compile(r"(?:.*/)?(?:python[\d.]*|bash|sh|env)|.*\.(?:py|sh)")
MOST_WORDS = 8  # of a flag that are kept (our choice; a ramp-up of batches has three)


@dataclass(frozen=True, slots=True)
class Launcher:
    """The options of a launcher that are not the script's."""

    prefix: str = ""
    """Of the names of its fields, where options of scripts have the same names."""
    short: Mapping[str, str] = field(default_factory=dict)
    """Long names of letters."""
    own: frozenset[str] = frozenset()
    """Long options that have the prefix; others count as those of the script."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """How many values an option has, where that is not one."""
    is_alone: bool = False
    """Whether all options are its own: no script follows."""

    def name(self, option: str) -> str:
        """The field of an option, with underscores."""
        own = (self.own, self.short.values(), self.counts)
        is_own = self.is_alone or any(option in names for names in own)
        return f"{self.prefix}{option}" if is_own else option


def _switches(*names: str) -> dict[str, int]:
    return dict.fromkeys(names, 0)


_TORCH = Launcher(counts=_switches("standalone", "no_python", "use_env", "run_path"))
_OF_SLURM = {"N": "nodes", "n": "ntasks"}
SBATCH = Launcher(prefix="sbatch.", short=_OF_SLURM, is_alone=True)
"""Of the lines of a script that Slurm reads (`#SBATCH`)."""
_MPI = Launcher(
    prefix="mpirun.",
    short={"np": "np", "n": "np", "c": "np"},
    own=frozenset({"host", "hostfile", "map_by", "bind_to", "rank_by", "wdir"}),
    counts={"mca": 2, "gmca": 2}
    | _switches("allow_run_as_root", "oversubscribe", "tag_output", "report_bindings"),
)
LAUNCHERS: Mapping[str, Launcher] = {
    "torchrun": _TORCH,
    "torch.distributed.run": _TORCH,
    "torch.distributed.launch": _TORCH,
    "deepspeed": Launcher(
        counts=_switches("no_python", "no_local_rank", "no_ssh", "force_multi", "save_pid")
    ),
    "srun": Launcher(
        prefix="srun.",
        short=_OF_SLURM,
        own=frozenset(
            {
                *("ntasks_per_node", "cpus_per_task", "gpus", "gpus_per_node", "gpus_per_task"),
                *("gres", "partition", "account", "qos", "time", "mem", "job_name", "output"),
                *("error", "mpi", "export", "nodelist", "exclude", "profile", "cpu_bind"),
                *("gpu_bind", "container_image", "container_mounts", "container_name", "chdir"),
                *("container_workdir", "jobid", "reservation", "constraint", "distribution"),
            }
        ),
        counts=_switches(
            *("label", "unbuffered", "exclusive", "overlap", "no_kill", "kill_on_bad_exit"),
            *("no_container_mount_home", "verbose"),
        ),
    ),
    "mpirun": _MPI,
    "mpiexec": _MPI,
}
"""By the word that starts it; the launcher of torch is also a module (`python -m`)."""


@dataclass(slots=True)
class Command:
    """The flags of one command, whose words may stand on several lines."""

    launcher: Launcher | None = None
    """Whose options come next; None for the script's."""

    def flags(self, words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
        """Each flag of a line with the words behind it."""
        name, said, most = "", list[str](), 0
        for word in words:
            option = self._option(word)
            if option or self._ends(word, said, is_full=len(said) >= most):
                if name:
                    yield name, said
                name, said, most = option or ("", [], 0)
            elif len(said) < most and not word.endswith("[@]}"):
                said.append(word)
        if name:
            yield name, said

    def _option(self, word: str) -> tuple[str, list[str], int] | None:
        """The name, the values and the most values of a flag that begins, without a name for one
        that is left out; None for another word."""
        if FLAG.match(word):
            option, equals, value = word[2:].partition("=")
            said = [value] if equals else []
            option = option.replace("-", "_")
            if not self.launcher:
                return option, said, MOST_WORDS
            if option == "module":
                self.launcher = None  # the module is the script
                return "", [], 0
            most = 1 if equals else self.launcher.counts.get(option, 1)
            return self.launcher.name(option), said, most
        short = _SHORT.fullmatch(word) if self.launcher else None
        if short and self.launcher:
            option = self.launcher.short.get(short[1], "")
            if short[1] == "m":
                self.launcher = None
            name = self.launcher.name(option) if self.launcher and option else ""
            return name, [short[2]] if short[2] else [], 1
        return None

    def _ends(self, word: str, said: Sequence[str], is_full: bool) -> bool:
        """Whether no flag goes on with this word: a launcher, a program, or the end of all."""
        base = word.rpartition("/")[2]
        if base in LAUNCHERS and (is_full or self.launcher):
            self.launcher = LAUNCHERS[base]
            return True
        if _ENDS.match(word):
            self.launcher = None
            return True
        if self.launcher and self.launcher.is_alone:
            return is_full
        if self.launcher and not word.startswith("$"):
            is_program = is_full or bool(_PROGRAM.fullmatch(word))
            if is_program:
                self.launcher = None
            return is_program
        return bool(said) and word.endswith(".py")
