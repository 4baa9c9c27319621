"""Graph, schedule -> the action for each residual, as text, and by name as a policy for `jax.checkpoint`."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from .._model._graph import Graph, Node
from .._model._primitive_names import GATHER
from .._model._schedule import Schedule, idle
from .._runtime._bytes import format_nbytes
from .._runtime._errors import ArgumentError


@dataclass(frozen=True, slots=True)
class Action:
    """A plan's decision about one residual.

    **Fields:** `value`, its id; `name`, the user's `checkpoint_name`, else the primitive that computes it; `shape` as
    text; `nbytes`; `action`; `stages`, in which it is recomputed (none if nothing reads it), or before which it is
    copied back from host memory; `scope`, the name stack; `source`, the user's line; `pin`, the hint that decided it,
    else ""; `named`, whether the name is the user's; `sent`, the communication that computes it: a sum, a gather;
    `decision`, whether it is saved because a decision runs once (see `_rewrite._decisions`).
    """

    value: int
    name: str
    shape: str
    nbytes: int
    action: Literal["save", "recompute", "offload"]
    stages: tuple[int, ...]
    scope: str
    source: str
    pin: str = ""
    named: bool = False
    sent: tuple[Literal["sum", "gather"], ...] = ()
    decision: bool = False

    def __str__(self) -> str:
        stages = ", ".join(map(str, self.stages))
        many = "s" if len(self.stages) > 1 else ""
        where = f"recompute in stage{many} {stages}" if self.stages else "drop"
        kept = f"offload until stage {stages}" if self.action == "offload" else "save"
        why = " (pinned)" if self.pin else " (decision)" if self.decision else ""
        return (where if self.action == "recompute" else kept) + why


class Actions:
    """A plan's decisions about values, in `actions`, largest first."""

    actions: tuple[Action, ...]

    @property
    def drops_nothing(self) -> bool:
        """Whether nothing is recomputed and nothing is offloaded. The step may still have barriers for updates, if it
        has `stages`.
        """
        return all(a.action == "save" for a in self.actions)

    @property
    def saved_nbytes(self) -> int:
        """Bytes of the saved residuals, on the device or in host memory."""
        return sum(a.nbytes for a in self.actions if a.action != "recompute")

    @property
    def offloaded_nbytes(self) -> int:
        """Bytes of the residuals that are offloaded to host memory."""
        return sum(a.nbytes for a in self.actions if a.action == "offload")

    @property
    def dropped_nbytes(self) -> int:
        """Bytes of the residuals that are not saved: recomputed, or not needed again."""
        return sum(a.nbytes for a in self.actions if a.action == "recompute")

    @property
    def saved_names(self) -> frozenset[str]:
        """The names that `policy` saves, on the device or in host memory. A name is saved if the plan saves at least
        half of the bytes of its values.

        **Raises:** `ArgumentError` if the plan has no names.
        """
        saved = self._most(lambda action: action.action != "recompute")
        if not any(action.named for action in self.actions):
            raise ArgumentError(
                "The planned program has no names, and a policy knows values only by name. Name values with "
                '`jax.ad_checkpoint.checkpoint_name(x, "...")`, or all values of a function with '
                "`jaxremat.name_values(fn)`, and plan again."
            )
        return saved

    @property
    def offloaded_names(self) -> frozenset[str]:
        """The `saved_names` that `policy` offloads, by the same rule."""
        return self._most(lambda action: action.action == "offload")

    def _most(self, chosen: Callable[[Action], bool]) -> frozenset[str]:
        """Return the names with at least half of their bytes chosen."""
        balance: Counter[str] = Counter()
        for action in self.actions:
            if action.named:
                balance[action.name] += (1 if chosen(action) else -1) * max(action.nbytes, 1)
        return frozenset(name for name, nbytes in balance.items() if nbytes >= 0)

    def policy(self) -> Any:
        """Return a policy for `jax.checkpoint`, `flax.linen.remat`, `nnx.remat` or `nn.remat_scan` that saves the
        values of this plan.

        Policies know values by the names that `jax.ad_checkpoint.checkpoint_name` gave them, so the plan must be of a
        program that names its values, itself or by `jaxremat.name_values`. See `saved_names`. Name the operands of
        `tanh` and the like rather than the results: their derivatives read the result, not its named copy.

        JAX offloads the values that the plan offloads, see `offloaded_names`. A policy cannot schedule copies: the
        compiler may start all of them at once, which a planned step avoids.

        **Raises:** `ArgumentError` if the plan has no names.
        """
        from ._name_policy import by_name  # imports JAX, which the rest of a plan does not need

        return by_name(self.saved_names, self.offloaded_names)


class Decided(NamedTuple):
    """Values of the forward pass that are saved for the backward pass because decisions run once.

    **Fields:** the number of `values`, and their `nbytes`. They include masks and indices that solvers do not consider,
    because kernels write them together with their results.
    """

    values: int = 0
    nbytes: int = 0

    def __str__(self) -> str:
        values = f"{self.values} values" if self.values > 1 else "1 value"
        return (
            f"{values} ({format_nbytes(self.nbytes)}) saved because decisions run only once: see “Decisions” in "
            "the docs' Limits"
        )


NONE_DECIDED = Decided()


def decided(graph: Graph, schedule: Schedule) -> Decided:
    """Count the values that a schedule saves because of decisions."""
    waiting = [v for node in graph.nodes if not node.forward for v in node.inputs]
    waiting += [v for nodes in schedule.recomputed for n in nodes for v in graph.nodes[n].inputs]
    seen: set[int] = set()
    kept: set[int] = set()
    while waiting:
        v = waiting.pop()
        if v in seen or not graph.is_residual(v):
            continue
        seen.add(v)
        node = graph.nodes[graph.values[v].producer]
        if node.decides:
            kept.add(v)
        elif not graph.values[v].materialised:  # each reader recomputes it
            waiting.extend(node.inputs)
    return Decided(len(kept), sum(graph.values[v].saved_nbytes for v in kept))


def actions(graph: Graph, schedule: Schedule) -> tuple[Action, ...]:
    """Return the action of a schedule for each residual, largest first."""
    stages: dict[int, list[int]] = {}
    for k, nodes in enumerate(schedule.recomputed):
        for n in nodes:
            for v in graph.nodes[n].outputs:
                stages.setdefault(v, []).append(k)
    back = {copy.value: copy.begun for copy in schedule.offloaded}
    pins = {pin.at: pin.origin for pin in graph.pins if pin.action != "stage"}
    unread = idle(graph, schedule)
    names = _names(graph)
    found = []
    for v in graph.residuals:
        if v in unread:
            continue
        value, node = graph.values[v], graph.nodes[graph.values[v].producer]
        saved, away = v in schedule.saved, back.get(v)
        found.append(
            Action(
                value=v,
                name=names.get(v, node.primitive),
                shape=f"{value.length} x {value.shape}" if value.length > 1 else value.shape,
                nbytes=value.saved_nbytes,
                action="recompute" if not saved else "save" if away is None else "offload",
                stages=tuple(stages.get(v, ())) if not saved else () if away is None else (away,),
                scope=node.scope,
                source=node.source,
                pin=pins.get(v, ""),
                named=v in names,
                sent=_sent(node),
                decision=node.decides and saved,
            )
        )
    return tuple(sorted(found, key=lambda a: (-a.nbytes, a.value)))


def _sent(node: Node) -> tuple[Literal["sum", "gather"], ...]:
    gathers = node.primitive == GATHER or node.gathered_nbytes
    return (*(("sum",) if node.summed_nbytes else ()), *(("gather",) if gathers else ()))


def _names(graph: Graph) -> dict[int, str]:
    """Return the user's names of residuals.

    A name often follows a fused operation, `checkpoint_name(x @ w + b, "hidden")`, while the product is in memory. If
    nothing else reads the product, saving one is equivalent to saving the other.
    """
    readers: dict[int, list[int]] = {}
    for node in graph.nodes:
        for v in dict.fromkeys(node.inputs):
            readers.setdefault(v, []).append(node.id)
    names: dict[int, str] = {}
    for residual in graph.residuals:
        v = residual
        while not graph.values[v].name:
            reader = [graph.nodes[n] for n in readers.get(v, ())]
            if (
                len(reader) != 1
                or reader[0].fusion_root
                or not reader[0].forward
                or len(reader[0].outputs) != 1
            ):
                break
            if graph.values[reader[0].outputs[0]].nbytes != graph.values[residual].nbytes:
                break
            v = reader[0].outputs[0]
        if graph.values[v].name:
            names[residual] = graph.values[v].name
    return names
