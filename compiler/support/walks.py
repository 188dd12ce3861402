"""Walks over what things are made of, that visit every thing once and need no stack of calls.

A recursion over operands takes as many calls as there are paths: a chain of n values that each read
the one before twice has 2**n. Whoever asks something of a value that follows from its operands
asks through `answered`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, MutableMapping
from typing import TypeVar

Thing = TypeVar("Thing", bound=Hashable)
Answer = TypeVar("Answer")


def reached(start: Collection[Thing], after: Callable[[Thing], Iterable[Thing]]) -> set[Thing]:
    """`start`, and all that comes `after` any of it."""
    found, todo = set(start), list(start)
    while todo:
        fresh = set(after(todo.pop())) - found
        found |= fresh
        todo += fresh
    return found


def answered(
    thing: Thing,
    answers: MutableMapping[Thing, Answer],
    needs: Callable[[Thing], Iterable[Thing]],
    answer: Callable[[Thing], Answer],
) -> Answer:
    """The answer for `thing`, which `answers` keeps with all it took: `answer` is called when
    `answers` has those of everything that `needs` names, in the order a recursion would take.
    """
    todo, begun = [thing], set()
    while todo:
        one = todo[-1]
        if one in answers:
            todo.pop()
        elif one in begun:
            answers[one] = answer(one)
            todo.pop()
        else:
            begun.add(one)
            todo += [other for other in needs(one) if other not in answers][::-1]
    return answers[thing]
