"""Graph + the user's pins -> the graph with pins that do not contradict each other.

Patterns are matched against name stacks without JAX's parts (`jvp`, `transpose`, `jit`), followed by the primitive or
the value's name: `Model/Block_3/Dense_0/dot_general`. A glob is a path of any length that may match anywhere in it, and
`*` matches within one component: `Block_*`, `Dense_0/dot_general`. If it matches nothing there, it is tried on the
whole source line, `model.py:12 (Block.__call__)`. A compiled regular expression is searched for in both.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatchcase

from .._runtime._bytes import format_nbytes
from .._runtime._errors import HintError
from ._graph import Graph, Node, Pin
from ._host_copies import AT_ONCE, LEAST_NBYTES, SLICES
from ._schedule import Schedule
from ._stages import cut_stages

Pattern = str | re.Pattern[str]
Patterns = tuple[tuple[Pattern, str], ...]

_WRAPPED = re.compile(r"\w+\(([^()]*)\)")
_NEAR = 5


def parse_pins(pins: Mapping[Pattern, str]) -> Patterns:
    """Return the user's pins as checked pairs. **Raises:** `HintError`."""
    for pattern, action in pins.items():
        if action not in ("save", "recompute", "offload", "stage"):
            raise HintError(
                f"`pins={{{pattern!r}: {action!r}}}`: the action is unknown. "
                'Write "save", "recompute", "offload" or "stage".'
            )
        if not isinstance(pattern, str | re.Pattern) or not pattern:
            raise HintError(
                f"`pins={{{pattern!r}: {action!r}}}`: a pattern is text, such as "
                '"Block_*/Dense_0", or a compiled regular expression.'
            )
    return tuple(pins.items())


def matching(graph: Graph, patterns: Patterns, settled: bool) -> list[Pin]:
    """Return pins for all matches of the patterns: forward values in memory, and starts of backward passes.

    **Arguments:** `settled` whether it is known which values are in memory.

    **Raises:** `HintError` for a pattern without a match in the pass that its action concerns.
    """
    found: list[Pin] = []
    for pattern, action in patterns:
        text = pattern.pattern if isinstance(pattern, re.Pattern) else pattern
        origin = f'pins["{text}"] = "{action}"'
        forward = action != "stage"
        matched = [
            (n, group) for n in graph.nodes if n.forward == forward and (group := _match(graph, n, pattern))
        ]
        if not matched:
            near = _near(graph, text, forward)
            raise HintError(
                f"`pins={{{text!r}: {action!r}}}` matches nothing in the {'forward' if forward else 'backward'} pass. "
                + (f"Similar names are: {', '.join(near)}." if near else "The step has no similar names.")
            )
        if not forward:
            # One stage for each path that matches, at its first backward node.
            begins: dict[str, int] = {}
            for node, group in matched:
                begins.setdefault(group, node.id)
            found.extend(Pin("stage", n, origin) for n in begins.values())
            continue
        made = [v for node, _ in matched for v in node.outputs if graph.values[v].materialised]
        if settled and not set(made).intersection(replace(graph, stages=cut_stages(graph)).residuals):
            raise HintError(
                f"`pins={{{text!r}: {action!r}}}` matches {len(matched)} operations, but the backward pass "
                "reads none of their results from memory: they exist only inside kernels, or no operation "
                f'needs them. Mark the value itself, with `jaxremat.hint(x, "{action}")`.'
            )
        found.extend(Pin(action, v, origin) for v in made)
    return found


def with_pins(graph: Graph, pins: Sequence[Pin]) -> Graph:
    """Return the graph with the pins that have an effect, and their values in memory.

    **Raises:** `HintError` if two contradict each other, or one contradicts the program.
    """
    wanted: dict[tuple[bool, int], Pin] = {}
    for pin in pins:
        stage = pin.action == "stage"
        if stage:
            if graph.forward_stop < pin.at < len(graph.nodes) and not _leaves_a_loop(graph, pin.at):
                wanted.setdefault((stage, pin.at), pin)
            continue
        producer = graph.values[pin.at].producer
        if producer < 0 or not graph.nodes[producer].forward:
            continue  # arguments are always in memory, and backward values are never residuals
        other = wanted.setdefault((stage, pin.at), pin)
        if other.action != pin.action:
            raise HintError(
                f"{other.origin} contradicts {pin.origin}: both apply to {_what(graph, pin.at)}. "
                "Remove one of them."
            )
    chosen = [pin for (stage, _), pin in wanted.items() if not stage]
    cuts = [pin for (stage, _), pin in wanted.items() if stage]
    while True:
        in_memory = {pin.at for pin in chosen}
        values = tuple(replace(v, materialised=v.materialised or v.id in in_memory) for v in graph.values)
        found = replace(graph, values=values, pins=(*chosen, *cuts))
        # In loops that contain both passes, the stages determine which values are residuals.
        needed = frozenset(replace(found, stages=cut_stages(found)).residuals)
        if in_memory <= needed:
            break
        chosen = [pin for pin in chosen if pin.at in needed]
    for pin in chosen:
        node = graph.nodes[graph.values[pin.at].producer]
        if pin.action == "recompute" and not node.repeatable:
            raise HintError(
                f"{pin.origin} cannot be honoured: `{node.primitive}` may run only once, because it has an effect, is "
                "a collective, makes a decision, or connects a loop to the rest of the step. Its result is always "
                "saved. Remove it."
            )
    return found


def offloading(graph: Graph) -> list[Pin]:
    """Return the pins that want values in host memory."""
    return [pin for pin in graph.pins if pin.action == "offload"]


def staying(graph: Graph, schedule: Schedule) -> str:
    """Return text on the values of these pins that stay on the device under a schedule that may use host memory, and
    why.
    """
    here: dict[tuple[str, str], list[int]] = {}
    for pin in offloading(graph):
        if graph.host is not None and pin.at not in schedule.away:
            here.setdefault((pin.origin, _why_here(graph, pin.at)), []).append(pin.at)
    return " ".join(
        f"{origin}: {len(values)} of its values are not offloaded, first {_what(graph, values[0])}: {why}."
        for (origin, why), values in here.items()
    )


def _why_here(graph: Graph, v: int) -> str:
    assert graph.host is not None
    value, ahead = graph.values[v], graph.host.ahead_seconds
    if value.is_output:
        return "the step returns it"
    if value.nbytes < LEAST_NBYTES:
        return f"it is smaller than {format_nbytes(LEAST_NBYTES)}"
    if value.length:
        return f"a loop offloads at most {AT_ONCE} arrays, and none if it has {SLICES} iterations"
    if graph.away.copy_seconds(v) > ahead:
        return f"a copy takes longer than the {1e3 * ahead:g} ms by which the compiler starts it early"
    return "there is no time for its copies between its readers, or no room in host memory"


def _leaves_a_loop(graph: Graph, node: int) -> bool:
    """Return whether the node passes a loop's results on: a stage begins there anyway."""
    return graph.nodes[node].primitive in ("scan_last", "scan_stack")


def _what(graph: Graph, value: int) -> str:
    node = graph.nodes[graph.values[value].producer]
    return f"{graph.values[value].shape} from {node.primitive} ({node.source or node.scope})"


def _path(node: Node) -> list[str]:
    scope = node.scope
    while (plain := _WRAPPED.sub(r"\1", scope)) != scope:
        scope = plain
    return [*(part for part in scope.split("/") if part), node.primitive]


def _paths(graph: Graph, node: Node) -> list[list[str]]:
    path = _path(node)
    names = {graph.values[v].name for v in node.outputs} - {""}
    return [path, *([*path[:-1], name] for name in sorted(names))]


def _match(graph: Graph, node: Node, pattern: Pattern) -> str:
    """Return the part of a node's path up to the end of the pattern's match; "" for no match."""
    paths = _paths(graph, node)
    if isinstance(pattern, re.Pattern):
        for text in ("/".join(path) for path in paths):
            if match := pattern.search(text):
                return text[: match.end()] or text
        return node.source if pattern.search(node.source) else ""
    parts = [part for part in pattern.split("/") if part]
    for path in paths:
        for i in range(len(path) - len(parts) + 1):
            if all(map(fnmatchcase, path[i:], parts)):
                return "/".join(path[: i + len(parts)])
    return node.source if fnmatchcase(node.source, f"*{pattern}*") else ""


def _near(graph: Graph, text: str, forward: bool) -> list[str]:
    """Return similar names, the most similar first."""
    names: dict[str, None] = {}
    for node in graph.nodes:
        if node.forward == forward:
            for path in _paths(graph, node):
                names.update(dict.fromkeys(path))
                names.update(("/".join(path[i:]), None) for i in range(len(path) - 1))
    close = get_close_matches(text.replace("*", ""), names, _NEAR, 0.4)
    return close or list(names)[:_NEAR]
