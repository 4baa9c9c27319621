"""Annotations say what parameters are: few of them are `Any`."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import jaxremat

ROOT = Path(jaxremat.__file__).parent
MOST = 0.025
"""The share of parameters that may be `Any`: options that are handed on, results of JAX without a type, JSON."""


def means_any(annotation: ast.expr, aliases: set[str]) -> bool:
    """Return whether one of the names is in it, quoted ones too."""
    return not aliases.isdisjoint(re.findall(r"\w+", ast.unparse(annotation)))


def aliases_of_any(trees: list[ast.Module]) -> set[str]:
    """`Any`, and the names that are another word for it."""
    found = {"Any"}
    for tree in trees:
        for node in tree.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                target, value = node.target, node.value
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                target, value = node.targets[0], node.value
            else:
                continue
            if isinstance(value, ast.Name) and value.id == "Any":
                found.add(target.id)
    return found


def parameters(tree: ast.Module) -> Iterator[tuple[ast.FunctionDef, ast.arg, ast.expr]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            own = node.args
            several = [each for each in (own.vararg, own.kwarg) if each is not None]
            for each in (*own.posonlyargs, *own.args, *own.kwonlyargs, *several):
                if each.annotation is not None:
                    yield node, each, each.annotation


def test_what_any_is_called_is_seen() -> None:
    text = "from typing import Any\nX = Any\nY: TypeAlias = Any\ndef f(a: X, e, *b: 'list[Any]', d: int, **c: Y): pass"
    tree = ast.parse(text)
    aliases = aliases_of_any([tree])
    assert aliases == {"Any", "X", "Y"}
    assert [(arg.arg, means_any(kind, aliases)) for _, arg, kind in parameters(tree)] == [
        ("a", True), ("d", False), ("b", True), ("c", True),
    ]  # fmt: skip


def test_few_parameters_are_any() -> None:
    trees = {path: ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}
    aliases = aliases_of_any(list(trees.values()))
    count, found = 0, list[str]()
    for path, tree in trees.items():
        name = str(path.relative_to(ROOT))
        for function, arg, annotation in parameters(tree):
            count += 1
            if means_any(annotation, aliases):
                found.append(f"{name}:{arg.lineno} {function.name}({arg.arg}: {ast.unparse(annotation)})")
    assert count > 4000
    rooms = Counter(each.partition("/")[0].partition(":")[0] for each in found).most_common()
    assert len(found) <= MOST * count, "\n".join([f"{len(found)} of {count}: {rooms}", *found])
