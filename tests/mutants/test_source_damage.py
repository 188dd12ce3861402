"""Damages: what one line may become, what is left alone, and addresses that survive edits."""

from __future__ import annotations

import ast

import pytest

from tests.mutants.areas import area_of
from tests.mutants.campaign import PAGE, drawn, explained
from tests.mutants.damage import damages_of, read_damages, resolve
from tests.mutants.named import Named, named_damages
from tests.mutants.trees import ROOT


def became(line: str) -> set[str]:
    """What the line of a function may become."""
    source = f"def time(a, b):\n    {line}\n"
    return {d.applied(source).splitlines()[1].strip() for d in damages_of("m.py", source)}


@pytest.mark.parametrize(
    ("line", "others"),
    [
        ("a = 200", {"a = 220", "a = 180"}),
        ("a = 2.0", {"a = 2.2", "a = 1.8"}),
        ("return a < b", {"return (a <= b)", "return (a >= b)"}),
        ("return a == b", {"return (a != b)"}),
        ("return min(a, b)", {"return max(a, b)"}),
        ("return math.ceil(a)", {"return math.floor(a)"}),
        ("return -(-a // b)", {"return (a // b)"}),
        ("return a + b", {"return a", "return b", "return (a - b)"}),
        ("return a and b", {"return a", "return b", "return (a or b)"}),
        ("return a if b else 0", {"return a", "return 0", "return a if b else 1"}),
        ("a += b", {"a -= b", "pass"}),
        ("check(a)", {"pass"}),
        ("return [f for f in a if f]", {"return [f for f in a if True]"}),
        ("return {'a': a, 'b': b}", {"return ({'a': a})", "return ({'b': b})"}),
        ("for _ in range(a): pass", {"for _ in range((a + 1)): pass"}),
    ],
)
def test_a_line_becomes(line: str, others: set[str]) -> None:
    assert others <= became(line)


@pytest.mark.parametrize(
    "source",
    [
        '"""A module of 3 parts."""',
        "def f() -> Literal[3]: ...",
        "@retry(3)\ndef f(): ...",
        "def f(a):\n    raise ValueError(f'{a + 1} is too many')",
        "def f(a):\n    return LoadError('SW_A', f'{a + 1}')",
        "class A:\n    def __repr__(self):\n        return f'{self.a + 1}'",
        "def f(a):\n    logs.event('begun', a + 1)",
        "from a import b",
        "Event = tuple[int, str] | None",
    ],
)
def test_what_no_test_can_notice_is_left_alone(source: str) -> None:
    assert not damages_of("m.py", source)


def test_a_check_is_removed() -> None:
    source = "def f(a):\n    if a > 3:\n        raise ValueError\n"
    assert "def f(a):\n    if False:\n        raise ValueError\n" in {
        damage.applied(source) for damage in damages_of("m.py", source)
    }


def test_a_part_of_a_key_is_dropped() -> None:
    source = "def key_of(a, b):\n    return (a, b)\n"
    assert [d.diff(source).splitlines()[1].strip() for d in damages_of("m.py", source)] == [
        "+    return ((b,))",
        "+    return ((a,))",
    ]


def test_addresses_say_module_symbol_operator_and_number() -> None:
    source = "class A:\n    def f(self):\n        return self.b + 1\nC = 3\n"
    assert {d.address for d in damages_of("compiler/isa/costs.py", source)} == {
        "compiler.isa.costs:A.f#term#0",
        "compiler.isa.costs:A.f#term#1",
        "compiler.isa.costs:A.f#operator#0",
        "compiler.isa.costs:A.f#number#0",
        "compiler.isa.costs:A.f#number#1",
        "compiler.isa.costs:C#number#0",
        "compiler.isa.costs:C#number#1",
    }


def test_an_address_survives_moves() -> None:
    source = "def f(a, b):\n    return a * b\n"
    lower = damages_of("m.py", f"def e(a, b):\n    return a * b\n\n\n{source}")
    elsewhere = damages_of("n.py", source)
    for damage in damages_of("m.py", source):
        assert resolve(damage.address, lower).text == damage.text
        assert resolve(damage.address, elsewhere).text == damage.text
    with pytest.raises(KeyError, match="2 damages"):
        resolve("gone:f#term#0", [*damages_of("m.py", source), *elsewhere])


def test_numbers_of_tables_are_addressed_by_key() -> None:
    source = '{"facts": {"cores": {"value": [2, 40], "status": "documented 3"}}, "year": 2024}'
    assert {d.address: d.applied(source)[21:41] for d in damages_of("t.json", source)} == {
        "t.json:facts.cores.value.0#number#0": '"value": [3, 40], "s',
        "t.json:facts.cores.value.0#number#1": '"value": [1, 40], "s',
        "t.json:facts.cores.value.1#number#0": '"value": [2, 44], "s',
        "t.json:facts.cores.value.1#number#1": '"value": [2, 36], "s',
    }
    toml = '[touch]\nvalue = 0.5\nband = [0.1, 1.0]\nunit = "1"\n'
    assert [d.address for d in damages_of("c.toml", toml)] == [
        f"c.toml:touch.{key}#number#{ordinal}"
        for key in ("value", "band.0", "band.1")
        for ordinal in (0, 1)
    ]
    assert damages_of("c.toml", toml)[4].applied(toml).splitlines()[2] == "band = [0.1, 1.1]"


def test_columns_count_characters() -> None:
    source = "MARK = '\u2588' * 3\n"
    assert [d.applied(source) for d in damages_of("m.py", source) if d.operator == "number"] == [
        "MARK = '\u2588' * 4\n",
        "MARK = '\u2588' * 2\n",
    ]


def test_every_damage_of_every_area_has_its_own_address() -> None:
    damages = read_damages(ROOT, area_of(ROOT))
    assert len({damage.address for damage in damages}) == len(damages) > 10_000
    for damage in drawn(ROOT, 60, seed=1):
        source = (ROOT / damage.path).read_text()
        damaged = damage.applied(source)
        assert damaged != source
        if damage.path.endswith(".py"):
            assert ast.dump(ast.parse(damaged)) != ast.dump(ast.parse(source))


def test_survivors_that_are_explained_are_damages() -> None:
    known = read_damages(ROOT, area_of(ROOT))
    for address in explained((ROOT / PAGE).read_text()):
        resolve(address, known)


@pytest.mark.parametrize("damage", named_damages(), ids=lambda damage: damage.name)
def test_a_damage_with_a_name_is_one_of_its_source(damage: Named) -> None:
    source = (ROOT / damage.path).read_text()
    damaged = damage.of(source).applied(source)
    assert ast.dump(ast.parse(damaged)) != ast.dump(ast.parse(source))
    assert all((ROOT / file).is_file() for file in damage.tests)


def test_a_damage_with_a_name_has_its_text_once_in_its_symbol() -> None:
    source = "B = 2\n\n\nclass A:\n    def f(self):\n        return 2\n"
    named = Named("less", "m.py", "A.f", "2", "1", ())
    assert named.of(source).applied(source) == source.replace("return 2", "return 1")
    with pytest.raises(ValueError, match=r"less: A\.f requires '2' once"):
        named.of(source.replace("return 2", "return 2 + 2"))
