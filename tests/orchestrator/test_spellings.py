"""Strategies and machines in the words of scripts: any case, `-` or `_`, older names, families; on
every verb that takes one."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwright.compiler.machine.target import families, target_names
from shardwright.orchestrator import cli
from shardwright.orchestrator.cli import main
from shardwright.orchestrator.config import config
from shardwright.orchestrator.config.job_flags import job_configs
from shardwright.sharding.settings import STRATEGIES

WORDS = {
    "FSDP": "fsdp",
    "Fsdp": "fsdp",
    "nemo": "llm-training",
    "NEMO": "llm-training",
    "llm_training": "llm-training",
    "LLM-Training": "llm-training",
    "GENERIC": "generic",
    "Manual": "manual",
}
MACHINES = {
    **families(),
    "TRN1N": families()["trn1n"],
    "Trn2": families()["trn2"],
    "INF2.48xlarge": "inf2.48xlarge",
}


def job_verbs(
    parser: argparse.ArgumentParser | None = None, before: tuple[str, ...] = ()
) -> Iterator[tuple[argparse.ArgumentParser, tuple[str, ...]]]:
    """Every verb that takes `--strategy` and `--target` of a job."""
    parser = parser or cli._parser()
    flags = {action.dest for action in parser._actions}
    if {"strategy.name", "cluster.target"} <= flags:
        yield parser, before
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield from job_verbs(inner, (*before, name))


def test_every_verb_that_takes_a_job_takes_every_word(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text("")
    found = list(job_verbs())
    assert {"plan", "run", "sweep", "scale", "submit"} <= {words[0] for _, words in found}
    for parser, words in found:
        given = {"strategy": WORDS, "target": MACHINES}
        first = [str(file)] if words == ("submit",) else []
        for flag, table in given.items():
            for typed, meant in table.items():
                args = parser.parse_args([*first, f"--{flag}", typed])
                job = job_configs(args, [None])[None]
                value = job.strategy.name if flag == "strategy" else job.cluster.target
                assert value == meant, (words, flag, typed)


@pytest.mark.parametrize(("typed", "meant"), WORDS.items())
def test_a_job_file_takes_a_strategy_in_every_spelling(
    typed: str, meant: str, tmp_path: Path
) -> None:
    file = tmp_path / "job.toml"
    file.write_text(f'[strategy]\nname = "{typed}"\n[cluster]\ntarget = "inf2"\n')
    job = config.load(file)
    assert (job.strategy.name, job.cluster.target) == (meant, families()["inf2"])
    assert (
        config.load(None, [f"strategy.name={typed}", "cluster.target=TRN1"]).strategy.name == meant
    )


def test_the_words_are_all_that_there_are() -> None:
    assert set(WORDS.values()) == set(STRATEGIES)
    assert set(MACHINES.values()) <= set(target_names())


def test_an_unknown_word_is_refused_with_those_that_are_known(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", "--model", "llama2-7b", "--strategy", "fsdpp"]) == 2
    assert "did you mean fsdp?" in capsys.readouterr().err
    assert main(["plan", "--model", "bert-base", "--target", "trn9"]) == 2
    assert "NCC_EARG001" in capsys.readouterr().err


def test_prices_and_collectives_take_families(capsys: pytest.CaptureFixture[str]) -> None:
    prices = config.load(None, ["price.usd_per_hour=trn1=9,TRN2=20"]).price.usd_per_hour
    assert prices == (("trn1.32xlarge", 9.0), (families()["trn2"], 20.0))
    found = []
    for target in ("TRN1", "trn1.32xlarge"):
        assert main(["nccom", "allr", "-r", "32", "--target", target, "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0] == found[1] and "trn1.32xlarge" in json.dumps(found[0])
