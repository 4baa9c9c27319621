"""The cheapest schedule within a budget, as a mixed-integer linear program (python-mip, CBC).

Variables, all binary, over residuals `v`, their producers `n` and stages `k`:

    s[v]    saved from the forward pass to the last reader
    r[n,k]  node n is recomputed for stage k, for stages within `window` of the stages that read its outputs
    h[v,k]  a value that was recomputed before is held from stage k-1 into stage k (values at stage boundaries)

    minimise    sum seconds(n) r[n,k]
    subject to  s[v] + r[prod(v),k] + h[v,k] >= 1                     stage k reads v
                r[n,k] <= s[u] + r[prod(u),k] + h[u,k]                n reads u
                h[v,k] <= r[prod(v),k-1] + h[v,k-1]
                live(e) <= budget                                      for moments e of the schedule

`live(e)` is linear from below: every term is a value that is alive at `e` whenever its variables are one. A value
whose life hangs on two decisions (saved, and read by a recomputed node) contributes `b (x + y - 1)`. Moments are added
where the simulator finds the incumbent above the budget, until it finds none: each program is a relaxation of the true
problem, so its bound is a bound on every schedule within the window, and the last incumbent fits by the simulator's
own measure.
"""

import time
from dataclasses import dataclass, field

import mip

from .._errors import SolverError
from .._graph import Graph
from .._schedule import Schedule, complete, must_save
from .._simulate import simulate
from ._frontiers import boundaries
from ._interface import Solution
from ._mincut import MinCut
from ._moments import Moments, Terms

MIB = float(2**20)


@dataclass(frozen=True)
class Milp:
    """The default solver.

    **Arguments:** `gap`: stop when the schedule is proven within this share of the step's time; `variables`: the
    recomputation window is the widest that needs no more than this many binaries; `threads` of the solver.
    """

    gap: float = 0.001
    variables: int = 6000
    threads: int = 1

    def solve(self, graph: Graph, budget_nbytes: int | None, *, time_limit: float) -> Solution:
        deadline = time.monotonic() + time_limit
        start = MinCut().solve(graph, budget_nbytes, time_limit=time_limit)
        profile = simulate(graph, start.schedule)
        if start.schedule.drops_nothing and (budget_nbytes is None or profile.peak_nbytes <= budget_nbytes):
            if budget_nbytes is not None or not graph.residuals:
                return Solution(start.schedule, 0.0, True, "milp")
        model = _Model(graph, self)
        if budget_nbytes is None:
            least = model.least_memory(start.schedule, deadline)
            if least.schedule is None:
                return Solution(start.schedule, 0.0, False, "milp")
            budget_nbytes = simulate(graph, least.schedule).peak_nbytes
            found = model.least_time(budget_nbytes, least.schedule, deadline)
        else:
            fits = profile.peak_nbytes <= budget_nbytes
            found = model.least_time(budget_nbytes, start.schedule if fits else None, deadline)
        schedule = found.schedule or start.schedule
        step = graph.step_seconds or 1.0
        return Solution(schedule, max(found.bound_seconds, 0.0) / step, found.proven, "milp")


@dataclass
class _Found:
    schedule: Schedule | None
    bound_seconds: float = 0.0
    proven: bool = False


@dataclass
class _Model:
    graph: Graph
    options: Milp
    moments: Moments = field(init=False)

    def __post_init__(self) -> None:
        graph = self.graph
        self.fixed = must_save(graph)
        self.free = [v for v in graph.residuals if v not in self.fixed]
        self.window = self._window()
        border = boundaries(graph)
        self.holdable = {(v, k) for k, nodes in enumerate(self.window) for v in self._outputs(nodes) if v in border and k}
        self.moments = Moments(graph, self.fixed)

    def _outputs(self, nodes: set[int]) -> list[int]:
        return [v for n in nodes for v in self.graph.nodes[n].outputs if self.graph.values[v].materialised]

    def _window(self) -> list[set[int]]:
        """For each stage the nodes that may be recomputed for it."""
        graph, free = self.graph, set(self.free)
        reach: list[set[int]] = [{graph.values[v].producer for v in graph.needs(k) if v in free} for k in range(len(graph.stages))]
        edge = [set(nodes) for nodes in reach]
        while any(edge):
            grown = []
            for k, nodes in enumerate(edge):
                more = {graph.values[u].producer for n in nodes for u in graph.reads[n] if u in free}
                more = {n for n in more if graph.stage_of[n] < k}
                grown.append(more - reach[k])
            if sum(map(len, reach)) + sum(map(len, grown)) > self.options.variables:
                break
            for nodes, more in zip(reach, grown, strict=True):
                nodes |= more
            edge = grown
        return reach

    def least_time(self, budget_nbytes: int, start: Schedule | None, deadline: float) -> _Found:
        return self._solve(start, deadline, budget_nbytes)

    def least_memory(self, start: Schedule, deadline: float) -> _Found:
        return self._solve(start, min(deadline, time.monotonic() + max((deadline - time.monotonic()) / 2, 0.0)), None)

    def _solve(self, start: Schedule | None, deadline: float, budget_nbytes: int | None) -> _Found:
        graph, step = self.graph, self.graph.step_seconds or 1.0
        model = mip.Model(sense=mip.MINIMIZE, solver_name=mip.CBC)
        model.verbose = 0
        model.threads = self.options.threads
        model.seed = 1
        save = {v: model.add_var(var_type=mip.BINARY) for v in self.free}
        again = {(n, k): model.add_var(var_type=mip.BINARY) for k, nodes in enumerate(self.window) for n in sorted(nodes)}
        hold = {key: model.add_var(var_type=mip.BINARY) for key in sorted(self.holdable)}
        peak = model.add_var(lb=0.0) if budget_nbytes is None else None

        def ready(v: int, k: int) -> list[mip.Var]:
            producer = graph.values[v].producer
            options = (save.get(v), again.get((producer, k)), hold.get((v, k)))
            return [x for x in options if x is not None]

        for k in range(len(graph.stages)):
            for v in graph.needs(k):
                if v in save:
                    model.add_constr(mip.xsum(ready(v, k)) >= 1)
            for n in sorted(self.window[k]):
                for u in graph.reads[n]:
                    if u in save and graph.stage_of[graph.values[u].producer] < k:
                        model.add_constr(again[n, k] <= mip.xsum(ready(u, k)))
        for v, k in sorted(self.holdable):
            before = [again.get((graph.values[v].producer, k - 1)), hold.get((v, k - 1))]
            model.add_constr(hold[v, k] <= mip.xsum(x for x in before if x is not None))

        def limit(terms: Terms) -> None:
            parts = []
            constant = terms.constant_nbytes / MIB
            for keys, nbytes in terms.parts:
                found = [self._variable(key, save, again, hold) for key in keys]
                if any(x is None for x in found):
                    continue
                parts.append((nbytes / MIB) * (mip.xsum(x for x in found if x is not None) - (len(found) - 1)))
            if budget_nbytes is None:
                model.add_constr(mip.xsum(parts) + constant <= peak)
            elif parts:
                model.add_constr(mip.xsum(parts) <= (budget_nbytes - graph.base_nbytes) / MIB - constant)

        for terms in self.moments.initial():
            limit(terms)
        cost = mip.xsum(100 * graph.nodes[n].seconds / step * x for (n, _), x in again.items())
        if peak is None:
            model.objective = cost
            model.max_mip_gap_abs = 100 * self.options.gap
            model.max_mip_gap = 1e-9
        else:
            ceiling = sum(graph.values[v].nbytes for v in self.free) / MIB or 1.0
            model.objective = peak + 1e-4 * ceiling / 100 * cost
            model.max_mip_gap = 0.002
        if start is not None:
            model.start = self._start(start, save, again, hold)
        best, bound = start, 0.0
        best_rank = self._rank(start, budget_nbytes) if start is not None else None
        while (left := deadline - time.monotonic()) > 0:
            status = model.optimize(max_seconds=max(left, 0.05))
            if status in (mip.OptimizationStatus.INFEASIBLE, mip.OptimizationStatus.INT_INFEASIBLE):
                return _Found(best if best_rank is not None and best_rank[0] == 0 else None, float("inf"), True)
            if status in (mip.OptimizationStatus.ERROR, mip.OptimizationStatus.UNBOUNDED):
                raise SolverError(
                    f"CBC ended with status {status.name} on a program of {model.num_cols} variables and {model.num_rows} "
                    "constraints. Try `solver=jaxremat.MinCut()`, which needs no integer program."
                )
            if peak is None and model.objective_bound is not None:
                bound = max(bound, model.objective_bound / 100 * step)
            if not model.num_solutions:
                break
            schedule = self._schedule(save, hold)
            rank = self._rank(schedule, budget_nbytes)
            if best_rank is None or rank < best_rank:
                best, best_rank = schedule, rank
            profile = simulate(graph, schedule)
            violated = self.moments.violated(schedule, profile, budget_nbytes if peak is None else int(peak.x * MIB) + graph.base_nbytes)
            if not violated:
                proven = status == mip.OptimizationStatus.OPTIMAL
                return _Found(best, bound, proven)
            for terms in violated:
                limit(terms)
        return _Found(best, bound, False)

    @staticmethod
    def _variable(key, save, again, hold):  # type: ignore[no-untyped-def]
        kind, *rest = key
        return save.get(rest[0]) if kind == "s" else (again if kind == "r" else hold).get(tuple(rest))

    def _rank(self, schedule: Schedule, budget_nbytes: int | None) -> tuple[float, ...]:
        profile = simulate(self.graph, schedule)
        if budget_nbytes is not None and profile.peak_nbytes <= budget_nbytes:
            return (0.0, profile.extra_seconds, profile.peak_nbytes)
        return (1.0, profile.peak_nbytes, profile.extra_seconds)

    def _schedule(self, save, hold) -> Schedule:  # type: ignore[no-untyped-def]
        saved = [v for v, x in save.items() if float(x.x) >= 0.5]
        kept = [key for key, x in hold.items() if float(x.x) >= 0.5]
        return complete(self.graph, saved, kept)

    def _start(self, schedule: Schedule, save, again, hold):  # type: ignore[no-untyped-def]
        chosen = {(n, k) for k, nodes in enumerate(schedule.recomputed) for n in nodes}
        start = [(x, float(v in schedule.saved)) for v, x in save.items()]
        start += [(x, float(key in chosen)) for key, x in again.items()]
        return start + [(x, float(key in schedule.kept)) for key, x in hold.items()]
