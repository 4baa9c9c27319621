"""What the source may hold, read off it with `ast`. What may import what is a contract of its own (pyproject.toml)."""

import ast
import re
from pathlib import Path

import jaxremat

ROOT = Path(jaxremat.__file__).parent
FILES = {str(path.relative_to(ROOT)): path for path in sorted(ROOT.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text(), name) for name, path in FILES.items()}
TALKATIVE = {"__main__.py", "_cli/_demo.py"}


def imports(tree: ast.AST, name: str) -> set[str]:
    """Full names of everything a module imports, inside functions too: `jax.numpy`, `jaxremat._model._graph`."""
    package = ["jaxremat", *Path(name).parent.parts]
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            found.update({module, *(f"{module}.{alias.name}" for alias in node.names)})
    return found


IMPORTS = {name: imports(tree, name) for name, tree in TREES.items()}


def imports_package(name: str, package: str) -> bool:
    return any(found == package or found.startswith(package + ".") for found in IMPORTS[name])


def own(name: str) -> set[str]:
    """The modules of this library that a module imports, as file names."""
    modules = {file: "jaxremat." + file.removesuffix(".py").replace("/", ".") for file in FILES}
    modules = {file: module.removesuffix(".__init__") for file, module in modules.items()}
    return {file for file, module in modules.items() if module in IMPORTS[name] and module != "jaxremat"}


DOOR = "_report/_name_policy.py"
"""The one module by which a plan reaches JAX: within `plan.policy()`, whose result is JAX's."""


def reachable(name: str, besides: str = "") -> set[str]:
    """The module and all it imports, directly or not."""
    seen, stack = {name}, [name]
    while stack:
        for other in own(stack.pop()) - seen - {besides}:
            seen.add(other)
            stack.append(other)
    return seen


def test_the_reader_of_imports_reads_them() -> None:
    """Else the tests below would pass on anything."""
    text = "import jax.numpy as jnp\ndef f():\n    from . import _compat\n    from .._model._graph import Graph\n"
    assert imports(ast.parse(text), "_solver/_x.py") == {
        "jax.numpy", "jaxremat._solver", "jaxremat._solver._compat",
        "jaxremat._model._graph", "jaxremat._model._graph.Graph",
    }  # fmt: skip
    assert own("_model/_simulate.py") == {
        "_model/_graph.py", "_model/_host_copies.py", "_model/_schedule.py", "_model/_tape.py",
    }  # fmt: skip
    assert imports_package("_program/_compat.py", "jax._src")


def test_plans_reach_jax_only_when_they_are_asked_for_a_policy() -> None:
    assert [name for name in FILES if DOOR in own(name)] == ["_report/_actions.py"]
    nodes = list(ast.walk(TREES["_report/_actions.py"]))
    inside = [node.name for node in nodes if isinstance(node, ast.FunctionDef)
              and "jaxremat._report._name_policy" in imports(node, "_report/_actions.py")]  # fmt: skip
    outside = [
        node for node in TREES["_report/_actions.py"].body if isinstance(node, ast.ImportFrom | ast.Import)
    ]
    assert inside == ["policy"]
    assert not any(
        "jaxremat._report._name_policy" in imports(node, "_report/_actions.py") for node in outside
    )
    assert own(DOOR) == set()


def test_the_roofline_imports_no_jax_itself() -> None:
    """It takes its table of devices from `_devices`, which measures the CPU with JAX."""
    assert not imports_package("_compiler/_roofline.py", "jax")


def test_only_the_worker_of_the_milp_solver_imports_mip() -> None:
    """A process of its own, so that what crashes there does so alone. Nothing of this library imports a worker."""
    assert [name for name in FILES if imports_package(name, "mip")] == ["_solver/_mip_worker.py"]
    workers = ["_runtime/_worker_process.py", "_solver/_mip_worker.py", "_compiler/_target_worker.py"]
    assert not any(set(workers) & own(name) for name in FILES)
    assert all(own(name) == set() for name in workers)


def test_only_compat_touches_private_jax() -> None:
    """And the worker that compiles for GPUs, which imports nothing of this library."""
    for name, tree in TREES.items():
        if name not in ("_program/_compat.py", "_compiler/_target_worker.py"):
            assert not imports_package(name, "jax._src"), name
            attributes = [node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
            assert "_src" not in attributes, name


def test_only_compat_compares_versions_of_jax() -> None:
    for name, tree in TREES.items():
        if name == "_program/_compat.py":
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Compare):
                text = ast.unparse(node)
                assert "jax.__version__" not in text and "JAX_VERSION" not in text, f"{name}: {text}"
                assert "jax.version" not in text and "version_info" not in text, f"{name}: {text}"


def test_no_import_cycles() -> None:
    for name in FILES:
        if name == "__init__.py":
            continue
        for other in own(name):
            assert name not in reachable(other), f"{name} and {other} import each other"


def test_modules_are_documented() -> None:
    assert [name for name, tree in TREES.items() if not (ast.get_docstring(tree) or "").strip()] == []


def test_modules_are_short() -> None:
    lines = {name: len(path.read_text().splitlines()) for name, path in FILES.items()}
    assert {name: count for name, count in lines.items() if count > 600} == {}


def test_the_library_does_not_print() -> None:
    calls = [
        (name, node) for name, tree in TREES.items() for node in ast.walk(tree) if isinstance(node, ast.Call)
    ]
    prints = {
        name
        for name, node in calls
        if isinstance(node.func, ast.Name) and node.func.id in ("print", "breakpoint")
    }
    assert prints - TALKATIVE == set()


def test_public_names_are_documented() -> None:
    for name in dir(jaxremat):
        value = getattr(jaxremat, name)
        if not name.startswith("_") and getattr(value, "__module__", "").startswith("jaxremat"):
            assert value.__doc__, f"{name} has no docstring"


def test_importing_the_library_imports_no_mip() -> None:
    """A saved plan is used where no solver is installed."""
    import subprocess
    import sys

    code = "import sys, jaxremat; jaxremat.Plan; sys.exit('mip' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT.parent)


def test_only_the_terminal_and_what_talks_import_rich() -> None:
    """So that everything else shows nothing by itself."""
    found = {name for name in FILES if imports_package(name, "rich")}
    assert "_runtime/_progress_bars.py" in found
    assert all(
        name in TALKATIVE or name.startswith(("_runtime/_progress_bars", "_cli/", "_report"))
        for name in found
    )


NOUN_PHRASE = re.compile(r"(The|A|An|Whether|What|Which|How|Who|Of|Those|All)\b")


def test_docstrings_of_functions_begin_with_a_verb() -> None:
    """Those of properties name what they are."""
    functions = (
        (name, node)
        for name, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and not any("property" in ast.unparse(d) for d in node.decorator_list)
    )
    assert [
        f"{name}:{node.lineno}"
        for name, node in functions
        if NOUN_PHRASE.match(ast.get_docstring(node) or "")
    ] == []
