"""Published models, by names and shapes: routed right by their rule, never wrong in silence."""

import pathlib
import re

import pytest
from test_default import ASK, pasted, routing, tree_of, unsure

from optax_nora import by_path, infer_dimension_numbers, kernels, rules, stacked

TEXT = (pathlib.Path(__file__).parent / "trees" / "models.txt").read_text()
NAMES = {"by_path": by_path, "kernels": kernels, "rules": rules, "stacked": stacked}
COUNT = re.compile(r"\{(\d+)\}")


def axes(text):
    return tuple(int(axis) for axis in text.split(","))


def read(text):
    """The rule, the shape of each leaf, where it belongs, and the leaves that are asked for."""
    head, *lines = text.strip().splitlines()
    name, rule = head.split(" | ")
    shapes, belongs, asked = {}, {}, set()
    for path, shape, where in map(str.split, lines):
        count = COUNT.search(path)
        for i in range(int(count[1]) if count else 1):
            one = COUNT.sub(str(i), path)
            shapes[one] = axes(shape)
            if where.startswith("?"):
                asked.add(one)
            sides = where.removeprefix("?").split(">")
            belongs[one] = tuple(map(axes, sides)) if len(sides) == 2 else None
    return name, (eval(rule, NAMES), shapes, belongs, asked)


MODELS = dict(read(model) for model in TEXT.split("\n== ")[1:])


def test_there_are_twenty():
    assert len(MODELS) >= 20
    assert len({name.split(" ")[0] for name in MODELS}) >= 15


@pytest.mark.parametrize("name", MODELS)
def test_its_rule_routes_every_leaf(name):
    rule, shapes, belongs, asked = MODELS[name]
    routed = routing(shapes, rule)
    assert {path for path, where in routed.items() if where == ASK} == asked
    for path, where in belongs.items():
        assert path in asked or routed[path] == where, path
    if not asked:
        infer_dimension_numbers(tree_of(shapes), rule)


@pytest.mark.parametrize("name", MODELS)
def test_the_default_is_right_or_asks_or_says_that_it_is_unsure(name):
    _, shapes, belongs, _ = MODELS[name]
    doubted = unsure(shapes)
    wrong = {
        path: (where, belongs[path])
        for path, where in routing(shapes).items()
        if where != ASK and where != belongs[path] and path not in doubted
    }
    assert not wrong


@pytest.mark.parametrize("name", MODELS)
def test_what_is_proposed_is_right_when_pasted(name):
    _, shapes, belongs, _ = MODELS[name]
    before = routing(shapes)
    if ASK not in before.values():
        return
    after = pasted(shapes)
    wrong = {
        path: (after[path], belongs[path])
        for path, where in before.items()
        if where == ASK and after[path] != belongs[path] and belongs[path] is not None
    }
    assert not wrong
