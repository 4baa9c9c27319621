"""The cheapest schedule within a budget, as a mixed-integer linear program (`_integer_program`).

Variables, all binary, over residuals `v`, their producers `n` and stages `k`:

    s[v]    saved from the forward pass to the last stage that reads it (or the first that may recompute from it)
    e[v,k]  still in memory in stage k beyond that, to recompute from
    r[n,k]  node n is recomputed for stage k, for stages within `window` of the stages that read its outputs
    h[v,k]  an already recomputed value is kept from stage k-1 into stage k (values at stage boundaries)
    o[v]    v is saved in host memory, between the exit and the stage given by `Graph.away`; see `_host_link`

    minimise    sum seconds(n) r[n,k] + sum saved_seconds(v) s[v]      less for nodes that join a kernel: `_run_again`
    subject to  s[v] + r[prod(v),k] + h[v,k] >= 1                     stage k reads v
                s[v] = 0                                               v is pinned to be recomputed
                r[n,k] <= s[u] + r[prod(u),k] + h[u,k]                n reads u; e[u,k] for s[u] in later stages
                h[v,k] <= r[prod(v),k-1] + h[v,k-1]
                live(e) <= budget                                      for moments e of the schedule

`live(e)` is a linear lower bound: every term is a value that is alive at `e` whenever its variables are one. A value
that is alive only if two decisions are made (saved, and read by a recomputed node) contributes `b (x + y - 1)`. Moments
are added where the simulator finds the incumbent above the budget, until there are none. Each program is thus a
relaxation of the true problem: its bound holds for every schedule within the window, and the last incumbent fits by the
simulator.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from .._model._graph import Graph
from .._model._schedule import Schedule, close_over_dependencies, must_save
from .._model._simulate import extra_seconds, rank, simulate
from .._runtime._errors import warn
from .._runtime._garbage import uncollected
from .._runtime._progress import incumbent, note
from ._blocks import Blocks
from ._chen import Chen
from ._frontiers import boundaries, hold, holdable, repeated_seconds
from ._greedy import Greedy
from ._host_link import HostFirst, HostLink, only_needed
from ._hull import Lagrangian
from ._integer_program import IntegerProgram, Term
from ._interface import Solution, Solver
from ._mincut import MinCut
from ._moments import MIB, Moments, Terms

MOST_RESIDUALS = 2500
"""Graphs with more residuals get the best of the other solvers: writing the integer program would take too long."""

RATE, ROOT_NODES = 300_000, 20
"""Nonzeros x nodes that a second of a time limit stands for, and the nodes that a root counts as. Nodes are counted, so
schedules are the same on every machine. CBC did 100,000 to 1,000,000 on one core for steps of the zoo.
"""

GUARD_SECONDS, GUARD = 60.0, 10.0
"""A clock ends a program after these seconds plus this multiple of the seconds that its nodes stand for."""

TOLERANCE_NBYTES = 64
"""Tolerance of the integer program's arithmetic."""

HOLDING_SHARE = 0.1
"""Share of the work spent on keeping recomputed values across stages, once a schedule without it is known."""

LEAST_SLACKS = (0.0005, 0.02, 0.05)
"""Slack of the schedule of least memory above the least, as shares of the plain step's live bytes at its peak."""

FEW_HOLDABLE = 100
"""Any value may be kept from any stage to the next if there are at most this many such pairs. Otherwise only values at
stage boundaries may, and those that improve a schedule which recomputes a node for two stages in a row.
"""

MOST_HOLDABLE = 500
"""The same if nothing fits otherwise."""

LEAST_STEP = 0.01
"""A slack between the last that takes too long and the first that does not is tried if they differ by more than this.
"""

MOST_OVERHEAD = 1.0
"""If least memory takes more extra time than this share of the step, the next of `LEAST_SLACKS` is tried."""


@dataclass(frozen=True)
class Milp:
    """The default solver: a mixed-integer linear program.

    **Arguments:** `gap`: stop when the schedule is proven within this share of the step's time; `variables`: the most
    binary variables, which limit the recomputation window; `threads` of the solver. Time limits stand for work (see
    `RATE`), separately for each program.
    """

    gap: float = 0.002
    variables: int = 1000
    threads: int = 1

    def solve(self, graph: Graph, budget_nbytes: int | None, *, time_limit: float) -> Solution:
        found = self.begin(graph, budget_nbytes, time_limit=time_limit)
        if budget_nbytes is None:
            return found
        return self.finish(graph, budget_nbytes, found, time_limit=time_limit)

    @uncollected
    def begin(self, graph: Graph, budget_nbytes: int | None, *, time_limit: float) -> Solution:
        """Return the solution without the integer programs that keep values across stages; see `Staged`."""
        start = close_over_dependencies(graph, graph.residuals)
        free = not any(graph.values[v].saved_seconds for v in graph.residuals)
        if not graph.residuals or (
            free and start.drops_nothing and rank(graph, start, budget_nbytes)[0] == 0
        ):
            return Solution(start, 0.0, True, "milp")
        large = len(graph.residuals) > MOST_RESIDUALS
        solvers: list[Solver] = [Chen(), MinCut(), Greedy(), Blocks()]
        if graph.host is not None:
            solvers.append(HostFirst())
        for solver in solvers:
            known = solver.solve(graph, budget_nbytes, time_limit=time_limit).schedule
            start = min((start, known), key=lambda schedule: rank(graph, schedule, budget_nbytes))
        if large:
            return Solution(start, 0.0, False, "milp")
        if budget_nbytes is None:
            found = self._least(graph, start, time_limit)
        else:
            found = self._afresh(graph, budget_nbytes, start, time_limit)
            found = replace(found, schedule=only_needed(graph, found.schedule, budget_nbytes))
        bound = max(found.bound_seconds if found.fits else 0.0, graph.extra_seconds)
        return Solution(found.schedule, bound / (graph.step_seconds or 1.0), found.proven, "milp")

    @uncollected
    def finish(self, graph: Graph, budget_nbytes: int, begun: Solution, *, time_limit: float) -> Solution:
        """Return the solution of those programs, which is never worse; see `Staged`."""
        if len(graph.residuals) > MOST_RESIDUALS:
            return begun
        schedule = self._held(graph, budget_nbytes, begun.schedule, time_limit)
        if schedule == begun.schedule:
            return begun
        schedule = only_needed(graph, schedule, budget_nbytes)
        share = extra_seconds(graph, schedule) / (graph.step_seconds or 1.0)
        return replace(begun, schedule=schedule, lower_bound=min(begun.lower_bound, share))

    def priced(self, graph: Graph, price: float, start: Schedule, *, time_limit: float) -> Solution:
        """Return the schedule of least seconds + price x peak, and a bound on that; see `_hull.Priced`."""
        lagrangian = Lagrangian(graph, price)
        known = MinCut().priced(graph, price, start, time_limit=time_limit / 4).schedule
        if not graph.residuals or len(graph.residuals) > MOST_RESIDUALS:
            return Solution(known, 0.0, False, "milp")
        found = _Model(graph, self).solve(None, known, time_limit, lagrangian)
        return Solution(
            found.schedule, found.bound_seconds / (graph.step_seconds or 1.0), found.proven, "milp"
        )

    def _afresh(self, graph: Graph, budget_nbytes: int, start: Schedule, time_limit: float) -> "_Found":
        """Return the cheapest schedule that fits and recomputes each stage independently, with values kept if that
        improves it; if none fits, the cheapest with values kept.

        Keeping values reaches lower peaks and saves time, but weakens the relaxation: the bound is for the former.
        """
        found = _Model(graph, self).solve(budget_nbytes, start, time_limit)
        if found.fits:
            return found.of(graph, hold(graph, found.schedule, budget_nbytes))
        if found.proven:
            found = _Model(graph, self, holding=True).solve(budget_nbytes, start, time_limit)
        if found.proven and not found.fits and len(pairs := holdable(graph)) <= MOST_HOLDABLE:
            found = _Model(graph, self, holding=True, held=pairs).solve(budget_nbytes, start, time_limit)
        return found

    def _held(self, graph: Graph, budget_nbytes: int, known: Schedule, time_limit: float) -> Schedule:
        """Return the cheapest schedule that fits, with values kept across stages if that may improve it."""
        if rank(graph, known, budget_nbytes)[0] != 0 or extra_seconds(graph, known) <= graph.extra_seconds:
            return known
        few = len(pairs := holdable(graph)) <= FEW_HOLDABLE
        if not (few or known.kept or repeated_seconds(graph, known)):
            return known
        for held in (known.kept, pairs) if few else (known.kept,):
            model = _Model(graph, self, holding=True, held=held)
            known = model.solve(budget_nbytes, known, HOLDING_SHARE * time_limit).schedule
        return known

    def _least(self, graph: Graph, start: Schedule, time_limit: float) -> "_Found":
        """Return the schedule of least peak, or the fastest of those with nearly the least."""
        least = _Model(graph, self).solve(None, start, time_limit / 8)
        least = _Model(graph, self, holding=True).solve(None, least.schedule, time_limit / 8)
        peak = simulate(graph, least.schedule).peak_nbytes
        plain = (
            simulate(graph, close_over_dependencies(graph, graph.residuals)).peak_nbytes - graph.base_nbytes
        )
        found, most = least, MOST_OVERHEAD * graph.step_seconds
        low = high = 0.0  # shares of slack: the last that takes too long, and the first that does not
        for slack in LEAST_SLACKS:
            budget = peak + int(slack * plain)
            solvers: tuple[Solver, ...] = (MinCut(), HostFirst()) if graph.host else (MinCut(),)
            known = [s.solve(graph, budget, time_limit=time_limit / 8).schedule for s in solvers]
            start = min((found.schedule, *known), key=lambda schedule: rank(graph, schedule, budget))
            found, high = self._afresh(graph, budget, start, time_limit / 4), slack
            if extra_seconds(graph, found.schedule) <= most:
                break
            low = slack
        while low and high - low > LEAST_STEP:
            slack = (low + high) / 2
            nearer = self._afresh(graph, peak + int(slack * plain), found.schedule, time_limit / 8)
            fits = nearer.fits and extra_seconds(graph, nearer.schedule) <= most
            found, low, high = (nearer, low, slack) if fits else (found, slack, high)
        budget = peak + int(high * plain)
        return found.of(graph, self._held(graph, budget, found.schedule, time_limit / 4))


@dataclass(frozen=True)
class _Found:
    schedule: Schedule
    fits: bool
    bound_seconds: float
    proven: bool

    def of(self, graph: Graph, schedule: Schedule) -> "_Found":
        """Return the result with another schedule that takes no longer; the bound is lowered to its time."""
        bound = min(self.bound_seconds, extra_seconds(graph, schedule)) if self.fits else self.bound_seconds
        return replace(self, schedule=schedule, bound_seconds=bound)


@dataclass
class _Model:
    graph: Graph
    options: Milp
    holding: bool = False
    held: frozenset[tuple[int, int]] = frozenset()

    def __post_init__(self) -> None:
        graph = self.graph
        self.fixed = must_save(graph)
        self.free = [v for v in graph.residuals if v not in self.fixed]
        self.window = self._window()
        border = boundaries(graph) if self.holding else {}
        self.holdable = self.held | {
            (v, k)
            for k, nodes in enumerate(self.window)
            for v in self._outputs(nodes)
            if v in border and graph.holdable(v, k)
        }
        self.moments = Moments(graph, self.fixed, self.window)

    def _outputs(self, nodes: set[int]) -> list[int]:
        return [v for n in nodes for v in self.graph.nodes[n].outputs if self.graph.values[v].materialised]

    def _window(self) -> list[set[int]]:
        """Return for each stage the nodes that may be recomputed for it."""
        graph, free = self.graph, set(self.free)
        reach: list[set[int]] = [
            {graph.values[v].producer for v in graph.needs(k) if v in free} for k in range(len(graph.stages))
        ]
        edge = [set(nodes) for nodes in reach]
        while any(edge):
            grown = []
            for k, nodes in enumerate(edge):
                more = {graph.values[u].producer for n in nodes for u in graph.reads[n] if u in free}
                more = {n for n in more if graph.stage_of[n] < k}
                grown.append(more - reach[k])
            if sum(map(len, reach)) + sum(map(len, grown)) > self.options.variables:
                # Stop growing, except for values pinned to be recomputed: they are never in memory to recompute from.
                again = {graph.values[v].producer for v in graph.pinned["recompute"]}
                grown = [more & again for more in grown]
            for nodes, more in zip(reach, grown, strict=True):
                nodes |= more
            edge = grown
        return reach

    def solve(
        self,
        budget_nbytes: int | None,
        start: Schedule,
        seconds: float,
        lagrangian: Lagrangian | None = None,
    ) -> _Found:
        """Return the cheapest schedule within the budget, or with None the one of least peak, or of the least
        Lagrangian; never worse than `start`. The work is that which so many `seconds` stand for.
        """
        graph, step = self.graph, self.graph.step_seconds or 1.0

        def order(schedule: Schedule) -> tuple[float, ...]:
            return lagrangian.order(schedule) if lagrangian else rank(graph, schedule, budget_nbytes)

        program = IntegerProgram(self.options.threads)
        save = {v: program.binary() for v in self.free}
        again = {(n, k): program.binary() for k, nodes in enumerate(self.window) for n in sorted(nodes)}
        hold = {key: program.binary() for key in sorted(self.holdable)}
        longer = {(v, k): program.binary() for v in self.free for k in self.moments.extra[v]}
        peak = program.variable() if budget_nbytes is None else None
        variables: dict[str, dict[tuple[int, ...], int]] = {"e": longer, "r": again, "h": hold}
        variables["s"] = {(v,): x for v, x in save.items()}
        link = HostLink(graph, program, self.moments.away, save, start)
        variables["o"] = {(v,): x for v, x in link.offload.items()}

        for v in graph.pinned["recompute"].intersection(save):
            program.at_most([(save[v], 1.0)], 0.0)

        def ready(v: int, k: int, factor: float) -> list[Term]:
            producer = graph.values[v].producer
            saved = longer.get((v, k)) if k > self.moments.cover[v] else save[v]
            options = (saved, again.get((producer, k)), hold.get((v, k)))
            return [(x, factor) for x in options if x is not None]

        for k in range(len(graph.stages)):
            for v in graph.needs(k):
                if v in save:
                    program.at_least(ready(v, k, 1.0), 1.0)
            for n in sorted(self.window[k]):
                for u in graph.reads[n]:
                    if u in save and graph.stage_of[graph.values[u].producer] < k:
                        program.at_most([(again[n, k], 1.0), *ready(u, k, -1.0)], 0.0)
        for v, k in sorted(self.holdable):
            before = [again.get((graph.values[v].producer, k - 1)), hold.get((v, k - 1))]
            program.at_most([(hold[v, k], 1.0), *((x, -1.0) for x in before if x is not None)], 0.0)

        for v in self.free:
            chain = [save[v], *(longer[v, k] for k in self.moments.extra[v])]
            for before, after in pairwise(chain):
                program.at_most([(after, 1.0), (before, -1.0)], 0.0)

        def limit(terms: Terms, margin_nbytes: int = 0) -> bool:
            """Add the bound; return False if no choice of the variables can meet it."""
            parts: list[Term] = []
            constant = (terms.constant_nbytes + margin_nbytes) / MIB
            for keys, nbytes in terms.parts:
                if keys[0][0] == "q":
                    parts.append((link.waiting(*keys[0][1:]), nbytes / MIB))
                    continue
                # A product of keys is bounded from below by sum - (number - 1); a key without a variable is zero.
                found = [x for kind, *ids in keys if (x := variables[kind].get(tuple(ids))) is not None]
                if len(found) == len(keys):
                    parts.extend((x, nbytes / MIB) for x in found)
                    constant -= (len(found) - 1) * nbytes / MIB
            if peak is not None:
                program.at_most([*parts, (peak, -1.0)], -constant)
                return True
            allowed = ((budget_nbytes or 0) - graph.base_nbytes) / MIB
            if parts:
                program.at_most(parts, allowed - constant)
            return bool(parts) or constant <= allowed

        possible = all(limit(terms) for terms in self.moments.initial())
        terms, variables["a"] = _run_again(graph, program, again)
        cost = [(x, 100 * seconds / step) for seconds, x in terms]
        cost += [(x, 100 / step) for x in link.waits(again)]
        stacking = ((graph.values[v].saved_seconds, x) for v, x in save.items())
        cost += [(x, 100 * seconds / step) for seconds, x in stacking if seconds]
        if peak is None or lagrangian:
            if peak is not None and lagrangian:
                cost.append((peak, 100 * lagrangian.price * MIB / step))
            program.objective = cost
            program.gap_abs, program.gap = 100 * self.options.gap, 1e-9
        else:
            ceiling = sum(graph.values[v].saved_nbytes for v in self.free) / MIB or 1.0
            program.objective = [(peak, 1.0), *((x, 1e-4 * ceiling / 100 * c) for x, c in cost)]
            program.gap = 0.002
        constant = graph.extra_seconds + (lagrangian.price * graph.base_nbytes if lagrangian else 0.0)
        best, best_rank, bound, proven = start, order(start), constant, False
        if peak is not None or best_rank[0] == 0:
            program.start = self._start(start, variables)
        added: set[tuple[Terms, int]] = set()
        left = work = RATE * seconds
        proven, lost, rounding = not possible, False, 0
        while possible and left > 0 and not program.given_up:
            if peak is None:
                note(incumbent(best_rank, bound, step))
            # At most a third of the work per program: each round adds moments and solves again.
            nodes = max(int(min(left, work / 3) / max(program.nonzeros, 1)) - ROOT_NODES, 0)
            answer = program.optimize(GUARD_SECONDS + GUARD * seconds, nodes)
            left -= program.nonzeros * (ROOT_NODES + (nodes if answer.limited else 0))
            left, lost = 0 if answer.late else left, answer.lost
            if lost:
                continue
            if answer.infeasible:
                proven = True
                break
            if (peak is None or lagrangian) and answer.bound is not None and abs(answer.bound) < 1e12:
                bound = max(bound, constant + answer.bound / 100 * step)
            if answer.values is None:
                break
            schedule = self._schedule(variables, answer.values)
            found = order(schedule)
            if found < best_rank:
                best, best_rank = schedule, found
            profile = simulate(graph, schedule)
            if peak is not None:
                ceiling = int(answer.values[peak] * MIB) + graph.base_nbytes + TOLERANCE_NBYTES
            else:
                ceiling = budget_nbytes or 0
            violated = self.moments.violated(schedule, profile, ceiling)
            close = budget_nbytes is not None and profile.peak_nbytes <= budget_nbytes + TOLERANCE_NBYTES
            margin = max(rounding, TOLERANCE_NBYTES if close else 0)
            if not violated:
                proven = answer.status == "OPTIMAL" and not rounding
                break
            new = [terms for terms in violated if (terms, margin) not in added]
            if not new and schedule.offloaded:  # copies end later and begin earlier than in the rows
                rounding = margin = rounding + profile.peak_nbytes - ceiling
                new = violated
            if not new:  # they are violated by less than the solver's tolerance
                break
            added.update((terms, margin) for terms in new)
            if not all(limit(terms, margin) for terms in new):
                proven = True
                break
        if lost:
            warn(
                f"The integer program found no solution ({'; '.join(program.failures)}), so the plan is the "
                "heuristic solvers' best and may be slower than necessary. Raise `time_limit` or "
                "`planning_seconds` in `jaxremat.Planning`."
            )
        return _Found(
            best, best_rank[0] == 0, min(bound, best_rank[1]) if best_rank[0] == 0 else bound, proven
        )

    def _schedule(self, variables: dict[str, dict[tuple[int, ...], int]], values: list[float]) -> Schedule:
        chosen = {
            kind: [key for key, x in variables[kind].items() if values[x] >= 0.5] for kind in ("s", "h", "o")
        }
        saved, away = ([v for (v,) in chosen[kind]] for kind in ("s", "o"))
        return close_over_dependencies(self.graph, saved, ((v, k) for v, k in chosen["h"]), away)

    def _start(self, schedule: Schedule, variables: dict[str, dict[tuple[int, ...], int]]) -> list[Term]:
        graph = self.graph
        last: dict[int, int] = {}
        for k, nodes in enumerate(schedule.recomputed):
            last.update((u, k) for n in nodes for u in graph.reads[n])
        again = {(n, k) for k, nodes in enumerate(schedule.recomputed) for n in nodes}
        start = [(x, float(v in schedule.saved)) for (v,), x in variables["s"].items()]
        start += [
            (x, float(v in schedule.saved and last.get(v, -1) >= k)) for (v, k), x in variables["e"].items()
        ]
        start += [(x, float(key in again)) for key, x in variables["r"].items()]
        start += [(x, float(v in schedule.away)) for (v,), x in variables["o"].items()]
        return start + [(x, float(key in schedule.kept)) for key, x in variables["h"].items()]


def _run_again(
    graph: Graph, program: IntegerProgram, again: Mapping[tuple[int, int], int]
) -> tuple[list[tuple[float, int]], dict[tuple[int, ...], int]]:
    """Return the objective's terms for recomputation, (seconds, variable), and the variables `a` that it adds.

    A node that joins a kernel of the stage takes `fused_seconds`; it takes the rest too if it must run separately,
    because another node recomputed for that stage reads it. These terms are those that `simulate` counts: with `r[n,k]`
    for running node n again for stage k

        sum seconds(n) r[n,k]                                                 n joins nothing in stage k
        sum joined_seconds(n) r[n,k] + (seconds(n) - joined_seconds(n)) a[n,k]          n joins
                    r[n,k] + r[m,k] - 1 <= a[n,k] <= r[n,k]                              m reads n
                    a[n,k] <= sum r[m,k]                                                 over these m

    **Arguments:** `again` the binary variables r by node and stage.
    """
    terms: list[tuple[float, int]] = []
    apart: dict[tuple[int, ...], int] = {}
    reading: dict[tuple[int, int], list[int]] = {}  # value, stage -> variables of its readers
    for (n, k), x in again.items():
        for v in graph.reads[n]:
            reading.setdefault((v, k), []).append(x)
    for (n, k), x in again.items():
        node = graph.nodes[n]
        if graph.joins(n, k) < 0:
            terms.append((node.seconds, x))
            continue
        terms.append((node.fused_seconds, x))
        if readers := [y for v in node.outputs for y in reading.get((v, k), ())]:
            apart[n, k] = a = program.variable(1.0)
            for y in readers:
                program.at_least([(a, 1.0), (x, -1.0), (y, -1.0)], -1.0)
            program.at_most([(a, 1.0), (x, -1.0)], 0.0)
            program.at_most([(a, 1.0), *((y, -1.0) for y in readers)], 0.0)
            terms.append((node.seconds - node.fused_seconds, a))
    return terms, apart
