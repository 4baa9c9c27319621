"""Outcome -> the rows and sentences of a report, in text and HTML, with notes on how to read its charts and tables."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from .._compiler._peak_contents import Alive
from .._model._timeline import module_path, numberless
from .._runtime._bytes import format_nbytes
from ._account import Account
from ._actions import Action
from ._outcome import Outcome
from ._outcome import remarks as clauses

_HILL = (
    "Time runs from left to right, memory upwards. Memory rises in the forward pass and falls in the backward "
    "pass. "
)

NOTES = {
    "memory": _HILL
    + "The plan lowers the peak: it saves less of the forward pass (blue), and recomputes values (orange) when "
    "the backward pass needs them. The curves are the planner's model; the compiled peak is the compiler's "
    "own figure and stays within the budget.",
    "plain memory": _HILL
    + "The peak is within the budget without a plan. The curve is the planner's model; the compiled peak is "
    "the compiler's own figure.",
    "loops": "A loop is drawn with the memory of one iteration; what all its iterations save appears at its "
    "end.",
    "copies": "The rows underneath are copies to and from host memory, which run in parallel with the kernels. "
    "Of {seconds}, copies to the host take {gone}, and copies back {back}.",
    "values": "Residuals: values that the forward pass makes and the backward pass reads, the largest first. "
    "“Save” keeps a value in memory. “Recompute” drops it and computes it again before that stage of the backward "
    "pass (0 is the first). “Offload” keeps it in host memory until that stage. “Drop” means that no "
    "operation needs it any more.",
    "modules": "The same bytes by module of the model. The last column is the time of the module's recomputation.",
    "peak": "Arrays in memory at the compiled program's peak, besides arguments and outputs, by the "
    "compiler's own schedule. “Other” belongs to the update or to the compiler. Only these arrays "
    "determine the peak: to save more memory, look here first.",
    "rounds": "Each row is a compiled plan. Where the predicted and the compiled peak differed, the "
    "planner corrected its model and planned again. It returned the cheapest plan "
    "that fits. The gap bounds how much faster another plan could be in the planner's model.",
    "verified": "The compiler's figures for the program that runs.",
    "not compiled": "Nothing was compiled (`Planning(verify=False)`): all figures are the planner's model. "
    "Plan with `Planning(verify=True)` to have the compiler confirm the peak.",
}


def format_seconds(seconds: float) -> str:
    """Return seconds as text with three digits: `1.38 s`, `12.0 ms`, `840 us`."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= 0.9995 * scale:
            return f"{_three(seconds / scale)} {unit}"
    return f"{_three(seconds / 1e-9)} ns" if seconds else "0 s"


def _three(number: float) -> str:
    digits = 2 if abs(number) < 9.995 else 1 if abs(number) < 99.95 else 0
    return f"{number:.{digits}f}"


def is_plain(outcome: Outcome) -> bool:
    """Return whether the plain step runs."""
    return outcome.account.planned is None


def verdict(outcome: Outcome) -> str:
    """Return the result in one sentence."""
    peak, budget = format_nbytes(outcome.peak_nbytes), format_nbytes(outcome.budget_nbytes)
    needs = "needs" if outcome.compiled_peak_nbytes else "is expected to need"
    if is_plain(outcome):
        return (
            f"{outcome.step} {needs} {peak} as written, within its budget of {budget}. Nothing is recomputed."
        )
    plain = outcome.plain_needs
    return f"{outcome.step} {needs} {peak} of its budget of {budget}; the plain step needs {plain}."


def price(outcome: Outcome) -> str:
    """Return the plan's cost in one sentence."""
    if is_plain(outcome):
        return "The plan costs nothing: the program is the one that jax.jit compiles."
    modelled = (
        f"The planned step is estimated to take {_more(outcome.overhead)} time than the plain step by "
        "the planner's model"
    )
    if outcome.compiled_overhead is None:
        return f"{modelled}; nothing was compiled."
    programs = "the compiled program" if outcome.baseline_modelled else "the two compiled programs"
    return f"{modelled}, and {_more(outcome.compiled_overhead)} by a roofline of {programs}."


def _more(share: float) -> str:
    return f"{abs(share):.1%} {'less' if share < 0 else 'more'}"


def memory_note(outcome: Outcome) -> str:
    """Return a note on how to read the charts of memory."""
    note = NOTES["plain memory" if is_plain(outcome) else "memory"]
    if (run := outcome.account.planned) is not None and run.copies:
        gone, back = (format_seconds(run.link_seconds(back)) for back in (False, True))
        note += f" {NOTES['copies'].format(seconds=format_seconds(run.seconds), gone=gone, back=back)}"
    return f"{note} {NOTES['loops']}" if outcome.account.loops else note


def remarks(outcome: Outcome) -> str:
    """Return further remarks on the figures, in sentences, or ""."""
    found = clauses(outcome)
    if outcome.devices > 1:
        found.append(f"all bytes are per device (of {outcome.devices})")
    if outcome.margin_nbytes:
        found.append(f"{format_nbytes(outcome.margin_nbytes)} of the budget is kept free")
    return " ".join(f"{clause[:1].upper()}{clause[1:]}." for clause in found)


@dataclass(frozen=True, slots=True)
class Values:
    """Similar residuals with the same action: their number, total bytes, stages, place and pin."""

    fate: str
    count: int
    nbytes: int
    name: str
    shape: str
    stages: tuple[int, ...]
    module: str
    source: str
    pin: str

    @property
    def when(self) -> str:
        """The stages, `3` or `3 to 9`; "" if the values are not recomputed."""
        first, last = (self.stages[0], self.stages[-1]) if self.stages else ("", "")
        return str(first) if first == last else f"{first} to {last}"


def largest(actions: Iterable[Action]) -> list[Values]:
    """Return residuals in groups, those with most bytes first."""
    groups: dict[tuple[str, ...], list[Action]] = {}
    for a in actions:
        fate = "drop" if a.action == "recompute" and not a.stages else a.action
        module = numberless("/".join(module_path(a.scope)))
        groups.setdefault((fate, a.name, a.shape, a.source, module, a.pin), []).append(a)
    found = []
    for (fate, name, shape, source, module, pin), group in groups.items():
        modules = {"/".join(module_path(a.scope)) for a in group}
        found.append(
            Values(
                fate=fate,
                count=len(group),
                nbytes=sum(a.nbytes for a in group),
                name=name,
                shape=shape,
                stages=tuple(sorted({k for a in group for k in a.stages})),
                module=modules.pop() if len(modules) == 1 else module,
                source=source,
                pin=pin,
            )
        )
    return sorted(found, key=lambda v: -v.nbytes)


@dataclass
class Branch:
    """One module with those inside it; `children` by name, in program order."""

    name: str
    saved_nbytes: int = 0
    recomputed_nbytes: int = 0
    dropped_nbytes: int = 0
    seconds: float = 0.0
    extra_seconds: float = 0.0
    children: dict[str, "Branch"] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all residuals of the module."""
        return self.saved_nbytes + self.recomputed_nbytes + self.dropped_nbytes


def modules(account: Account) -> Branch:
    """Return the tree of modules; its root is the whole forward pass."""
    root = Branch("forward pass")
    for share in account.shares:
        branch = root
        for name in (None, *share.path):
            if name is not None:
                branch = branch.children.setdefault(name, Branch(name))
            branch.saved_nbytes += share.saved_nbytes
            branch.recomputed_nbytes += share.recomputed_nbytes
            branch.dropped_nbytes += share.dropped_nbytes
            branch.seconds += share.seconds
            branch.extra_seconds += share.extra_seconds
    return root


def rounds(outcome: Outcome) -> list[tuple[str, ...]]:
    """Return the search's log: a row for each compiled schedule, under `ROUND`."""
    rows = []
    for i, r in enumerate(outcome.rounds, 1):
        room = outcome.budget_nbytes - outcome.margin_nbytes
        rows.append(
            (
                str(i),
                format_nbytes(r.predicted_peak_nbytes),
                format_nbytes(r.compiled_peak_nbytes),
                "yes" if r.compiled_peak_nbytes <= room else "no",
                f"{r.overhead:.2%}",
                f"{r.compiled_overhead:.2%}",
                f"{r.gap:.2%}",
                str(r.stages),
                r.solver,
                f"{r.solve_seconds:.2f} s",
                f"{r.compile_seconds:.2f} s",
            )
        )
    return rows


ROUND = ("round", "predicted", "compiled", "fits", "overhead", "roofline", "gap", "stages", "solver", "solving",
         "compiling")  # fmt: skip
"""Names of the columns of `rounds`."""


def verified(outcome: Outcome) -> list[tuple[str, str]]:
    """Return the figures that the compiler confirmed, in rows of name and figure; none if nothing was compiled."""
    memory = outcome.memory
    if memory is None or outcome.compiled_peak_nbytes is None:
        return []
    room = outcome.budget_nbytes - outcome.margin_nbytes
    rows = [
        ("compiler", outcome.compiler),
        ("arguments", format_nbytes(memory.arguments_nbytes)),
        ("outputs", format_nbytes(memory.outputs_nbytes)),
        ("aliased (outputs in donated arguments)", f"-{format_nbytes(memory.aliased_nbytes)}"),
        ("temporaries", format_nbytes(memory.temporaries_nbytes)),
        ("peak, the sum of these", format_nbytes(memory.peak_nbytes)),
        ("budget", format_nbytes(outcome.budget_nbytes)),
    ]
    if outcome.margin_nbytes:
        rows.append(("of which kept free", format_nbytes(outcome.margin_nbytes)))
    if outcome.on_host_nbytes:
        rows.append(
            ("arguments that stay in host memory between steps", format_nbytes(outcome.on_host_nbytes))
        )
    if memory.host_nbytes:
        rows.append(("in addition, in host memory", format_nbytes(memory.host_nbytes)))
    return [*rows, ("left below the budget", format_nbytes(room - memory.peak_nbytes))]


def tidy(source: str) -> str:
    """Return a source line without anonymous inner functions: `net.py:7 (Net.__call__)`."""
    return re.sub(r"(\.<locals>)?(\.<(lambda|genexpr|listcomp)>|\.<locals>)", "", source)


def module_of(alive: Iterable[Alive]) -> str:
    """Return the module of a group of arrays, with `*` for numbers that differ.

    The operation of an array has a name such as `jit(step)/jvp(Net)/Dense_0/dot_general`; the module is `Net/Dense_0`.
    """
    modules = {"/".join(module_path(a.scope.partition("/")[2].rpartition("/")[0])) for a in alive}
    return modules.pop() if len(modules) == 1 else " or ".join(sorted(set(map(numberless, modules)))[:2])
