"""Moments of the schedule -> linear lower bounds on the bytes alive at them, for the integer program.

The keys of a term name variables of `_milp`: ("s", v), ("e", v, k), ("r", n, k), ("a", n, k), ("h", v, k), ("o", v). A
value counts if all of its keys are one. ("q", n) stands for the bytes that wait at node n for their copy to the host.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .._model._graph import Graph
from .._model._host_copies import Reading
from .._model._schedule import Schedule, close_over_dependencies
from .._model._simulate import Profile, joined, simulate

Key = tuple[str, *tuple[int, ...]]
Part = tuple[tuple[Key, ...], int]
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Terms:
    """`constant_nbytes + sum nbytes * [all keys are one]` bytes are alive at some moment, base excluded."""

    constant_nbytes: int
    parts: tuple[tuple[tuple[Key, ...], int], ...]


@dataclass(frozen=True, slots=True)
class _Life:
    """The readers of a residual, recomputation not included.

    **Fields:** `born` its producer; `forward` its last forward reader; `by_stage` the last reader of each stage;
    `until` the last node at which a saved original is in memory, for these readers or because a loop keeps it.
    """

    born: int
    forward: int
    by_stage: dict[int, int]
    until: int


class Moments:
    """Linear lower bounds on live bytes for one graph and one recomputation window."""

    def __init__(self, graph: Graph, fixed: frozenset[int], window: Sequence[set[int]]):
        self.graph = graph
        self.fixed = fixed
        self.free = [v for v in graph.residuals if v not in fixed]
        free = set(self.free)
        last: dict[int, int] = {}
        own: dict[int, dict[int, int]] = {v: {} for v in self.free}
        forward: dict[int, int] = {}
        until: dict[int, int] = {}
        for node in graph.kernels():
            k, loop = graph.stage_of[node.id], graph.reader_loop(node)
            for v in graph.reads[node.id]:
                end = max(node.id, graph.kept_until(v, loop))
                if v not in free:
                    last[v] = max(last.get(v, end), end)
                elif graph.stage_of[graph.values[v].producer] == k:
                    forward[v] = max(forward.get(v, end), end)
                else:
                    own[v][k] = node.id
                    until[v] = max(until.get(v, end), end)
        self.stacked = graph.away.stacked
        self._stacked_always = [v for v in self.stacked if v not in free]
        away = graph.away.alone.items()
        self.away = {v: copy for v, copy in away if v in free and v not in graph.away.stacked}
        # If a node with several results runs again, those that are saved are still read in the original. So each is in
        # memory once, and its bytes count by one of the two variables: by `r` for the values in `by_clone`.
        outputs = [[v for v in node.outputs if v in free] for node in graph.nodes]
        self.joint = frozenset(v for found in outputs if len(found) > 1 for v in found)
        self.by_clone: frozenset[int] = frozenset()
        self.joined: dict[
            tuple[int, int], int
        ] = {}  # node, stage -> another node of the kernel into which it is fused
        self.last = last  # last readers of values without variables
        starts = [stage.start for stage in graph.stages]
        for v, k in graph.lingering.items():
            end = starts[k] if k < len(starts) else len(graph.nodes) - 1
            last[v] = max(last.get(v, end), end)
        readable: dict[int, set[int]] = {v: set() for v in self.free}
        for k, nodes in enumerate(window):
            for n in nodes:
                for u in graph.reads[n]:
                    if u in free and graph.stage_of[graph.values[u].producer] < k:
                        readable[u].add(k)
        # A saved value lives through stage `cover`; beyond, only up to the last of its `extra` stages that needs it.
        self.cover = {
            v: graph.stage_of[until[v]] if v in until else min(readable[v], default=-1) for v in self.free
        }
        self.extra = {v: tuple(sorted(k for k in readable[v] if k > self.cover[v])) for v in self.free}
        self.lives = {
            v: _Life(born, forward.get(v, born), own[v], until.get(v, -1))
            for v in self.free
            for born in (graph.values[v].producer,)
        }
        delta = [0] * (len(graph.nodes) + 3)
        for value in graph.values:
            if value.producer < 0 or not value.materialised or value.is_output:
                continue
            known = forward if value.id in free else last
            stop = known.get(value.id, value.producer)
            begin = value.producer + (value.producer in graph.in_place)
            if stop >= begin:
                delta[begin] += value.nbytes
                delta[stop + 1] -= value.nbytes
            if value.length and stop >= (end := graph.loop_stop[graph.nodes[value.producer].loop]):
                delta[end] += value.saved_nbytes - value.nbytes
                delta[stop + 1] -= value.saved_nbytes - value.nbytes
        for i in range(1, len(delta)):
            delta[i] += delta[i - 1]
        self.base = delta
        self.across = [
            delta[stage.start] - (stage.start not in graph.in_place) * sum(self._made(stage.start))
            if stage.start < len(graph.nodes)
            else 0
            for stage in graph.stages
        ]

    def _end(self, v: int) -> int:
        """Return the first node from which a stacked value counts for all iterations, -1 if it is not stacked."""
        value = self.graph.values[v]
        return self.graph.loop_stop[self.graph.nodes[value.producer].loop] if value.length else -1

    def _original_nbytes(self, v: int, at: int) -> int:
        """Return the bytes of an original that is in memory at a node because a later node reads it."""
        value = self.graph.values[v]
        return value.saved_nbytes if at >= self._end(v) else value.nbytes

    def _made(self, n: int) -> list[int]:
        values = (self.graph.values[v] for v in self.graph.nodes[n].outputs)
        return [v.nbytes for v in values if v.materialised and not v.is_output]

    def initial(self) -> list[Terms]:
        """Return bounds that shape the first program: each stage's start, and its peaks if all or nothing is saved."""
        graph = self.graph
        moments: set[tuple[int, int]] = set()
        for schedule in (close_over_dependencies(graph, graph.residuals), close_over_dependencies(graph, ())):
            moments.update(self._tops(simulate(graph, schedule), None))
        terms = [self.own(n) for n, k in sorted(moments) if k < 0]
        terms.extend(self.recomputing(k, len(graph.nodes)) for k in range(len(graph.stages)))
        return [_without_idle_pairs(t, frozenset()) for t in terms]

    def violated(self, schedule: Schedule, profile: Profile, budget_nbytes: int) -> list[Terms]:
        """Return valid bounds that exclude the schedule, at moments where it exceeds the budget."""
        allowed = budget_nbytes - self.graph.base_nbytes
        moments = self._tops(profile, allowed)
        self.by_clone = self.joint - schedule.saved
        again = enumerate(schedule.recomputed)
        self.joined = {(n, k): m for k, nodes in again for n, m in joined(self.graph, k, nodes).items()}
        held: frozenset[Key] = frozenset(("h", v, k) for v, k in schedule.kept)
        return [_without_idle_pairs(self._with_pairs(n, k, schedule), held) for n, k in sorted(moments)]

    def _tops(self, profile: Profile, allowed: int | None) -> set[tuple[int, int]]:
        """Return for each stage (and the forward pass) the highest moment of its own nodes and of its recomputation."""
        graph = self.graph
        best: dict[tuple[int, bool], tuple[int, int, int]] = {}
        for node, made_for, live_nbytes in zip(*profile.runs, strict=True):
            if allowed is not None and live_nbytes <= allowed:
                continue
            again = made_for >= 0
            stage = made_for if again else graph.stage_of[node]
            if stage < 0 and not graph.counts_forward:
                continue
            top = best.get((stage, again))
            if top is None or live_nbytes > top[0]:
                best[stage, again] = (live_nbytes, node, made_for)
        return {(n, k) for _, n, k in best.values()}

    def _saved(self, v: int, k: int, own_at: int | None) -> list[Key]:
        """Return the variable that says whether the saved original is alive in stage `k`, during its recomputation or
        later.
        """
        life = self.lives[v]
        if v in self.by_clone:
            return []
        if not life.by_stage:
            covered = k < self.cover[v]
        elif own_at is not None:
            covered = life.until >= own_at
        else:
            covered = k <= self.cover[v]
        if covered:
            return [("s", v)]
        return [("e", v, j) for j in self.extra[v] if j > k][:1]

    def _elsewhere(self, v: int, at: int, k: int) -> bool:
        """Return whether an offloaded value is in host memory at a node, or where the stage before it begins.

        Recomputed readers that need it earlier are handled by `_with_pairs`.
        """
        return v in self.away and self.away[v].gone <= at and k < self.away[v].begun

    def _by_clone(self, v: int) -> bool:
        return v not in self.joint or v in self.by_clone

    def _clones(self, v: int, k: int, read: bool, made: bool) -> Iterator[tuple[Key, ...]]:
        """Yield the instances that stage `k` recomputed or received from the stage before, each counted once.

        **Arguments:** `read`: the stage has yet to read them; otherwise they are in memory only to be handed on.
        `made`: the recomputing kernel has run.
        """
        clone, held, handed_on = ("r", self.lives[v].born, k), ("h", v, k), ("h", v, k + 1)
        yield (held,) if read else (handed_on, held)
        if made:
            yield (clone,) if read and self._by_clone(v) else (handed_on, clone)

    def own(self, n: int) -> Terms:
        """Return the moment at which a node runs in its regular place."""
        k = self.graph.stage_of[n]
        parts: list[tuple[tuple[Key, ...], int]] = []
        for v in self.free:
            life, nbytes = self.lives[v], self.graph.values[v].nbytes
            if life.forward < n and life.born < n:
                there = self._original_nbytes(v, n)
                parts.extend(self._originals(v, n, k, there, self._saved(v, k, own_at=n)))
            if k >= 0:
                read = life.by_stage.get(k, -1) >= n
                if not read and self.joined.get((life.born, k), -1) >= n:
                    parts.append(((("r", life.born, k),), nbytes))
                    parts.append(((("a", life.born, k),), -nbytes))
                    parts.append(((("h", v, k + 1), ("h", v, k)), nbytes))
                else:
                    parts.extend((keys, nbytes) for keys in self._clones(v, k, read, made=True))
        parts.extend(self._stacks_elsewhere(n, k))
        parts.extend(self._leaving(n))
        constant = self.base[n] + self.graph.nodes[n].workspace_nbytes
        return Terms(constant, tuple(parts))

    def recomputing(self, k: int, upto: int) -> Terms:
        """Return the moment before stage `k` when every dropped node with an id below `upto` has been recomputed."""
        parts: list[tuple[tuple[Key, ...], int]] = []
        for v in self.free:
            life, nbytes = self.lives[v], self.graph.values[v].nbytes
            if life.forward < self.graph.stages[k].start:
                saved_nbytes = self.graph.values[v].saved_nbytes
                at = self.graph.stages[k].start
                parts.extend(self._originals(v, at, k, saved_nbytes, self._saved(v, k, own_at=None)))
            read = k in life.by_stage
            parts.extend((keys, nbytes) for keys in self._clones(v, k, read, made=life.born < upto))
        parts.extend(self._stacks_elsewhere(self.graph.stages[k].start, k))
        parts.extend(self._leaving(self.graph.stages[k].start))
        return Terms(self.across[k], tuple(parts))

    def _originals(self, v: int, at: int, k: int, nbytes: int, keys: list[Key]) -> Iterator[Part]:
        """Yield the bytes of a saved value that are on the device at a node, or where the stage before it begins."""
        for key in keys:
            yield (key,), nbytes
            yield from self._stack_elsewhere(v, at, k)
            if key[0] == "s" and self._elsewhere(v, at, k):
                yield (("o", v),), -nbytes

    def _here_nbytes(self, v: int, at: int, k: int, nbytes: int) -> int:
        """Return the bytes on the device at a node of a stage, of a value of `nbytes` whose stack is offloaded."""
        if v not in self.stacked or at < self.stacked[v].gone:
            return nbytes
        return self.graph.away.stacks.here_nbytes(v, k)

    def _stack_elsewhere(self, v: int, at: int, k: int) -> Iterator[Part]:
        """Yield the bytes, as a negative part, of a saved and counted stack that are in host memory."""
        whole = self.graph.values[v].saved_nbytes
        if (less := self._here_nbytes(v, at, k, whole) - whole) < 0:
            yield (("o", v),), less

    def _stacks_elsewhere(self, at: int, k: int) -> Iterator[Part]:
        """Yield the same for all stacks that are always saved."""
        for v in self._stacked_always:
            if at <= self.last.get(v, -1):
                yield from self._stack_elsewhere(v, at, k)

    def _leaving(self, at: int) -> Iterator[Part]:
        """Yield the bytes that wait for their copy to the host, if copies wait for one another."""
        if any(copy.gone <= at for copy in self.away.values()):
            yield (("q", at),), MIB

    def _outlived(self, u: int, at: int) -> bool:
        """Return whether from node `at` on only recomputation reads a value that is never recomputed itself."""
        value = self.graph.values[u]
        once = u in self.fixed or not self.graph.recomputable(u)
        counts = once and value.producer >= 0 and value.materialised
        return (
            counts and not value.is_output and value.producer < at and self.last.get(u, value.producer) < at
        )

    def _with_pairs(self, n: int, k: int, schedule: Schedule) -> Terms:
        """Return the moment's bound, including values that are alive only because this schedule's recomputed nodes read
        them.
        """
        graph = self.graph
        stage = k if k >= 0 else graph.stage_of[n]
        terms = self.recomputing(k, n) if k >= 0 else self.own(n)
        parts = list(terms.parts)
        counted = {keys[0] for keys, _ in parts if len(keys) == 1}
        cloned: set[int] = set()
        later = [
            (m, j)
            for j in range(max(stage, 0), len(graph.stages))
            for m in schedule.recomputed[j]
            if j > stage or (k >= 0 and m >= n)
        ]
        free = set(self.free)
        at = n if k < 0 else graph.stages[k].start

        def original(u: int, m: int, j: int) -> None:
            """Count the original, which is in memory because node `m`, recomputed for stage `j`, reads it."""
            nonlocal parts
            there = self._original_nbytes(u, at)
            if u in schedule.away and ("o", u) not in counted:
                there = self._here_nbytes(u, at, stage, there)
            if u in schedule.away.intersection(self.away) and (
                ("o", u) in counted and ("o", u, 0) not in counted
            ):
                if stage >= graph.away.begins(u, Reading(j, -1), self.away[u].gone):
                    counted.add(("o", u, 0))
                    parts.append(((("o", u), ("r", m, j)), there))
            elif u not in free:
                if self._outlived(u, at) and ("r", u) not in counted:
                    counted.add(("r", u))
                    parts.append(((("r", m, j),), there))
            elif u in schedule.saved and self.lives[u].forward < at and ("s", u) not in counted:
                counted.add(("s", u))
                # Together with the part of ("e", u, ...) the value would count twice.
                parts = [(keys, b) for keys, b in parts if keys[0][:2] != ("e", u)]
                parts.append(((("s", u), ("r", m, j)), there))

        for m, j in later:
            for u in graph.reads[m]:
                original(u, m, j)
                if u not in free:
                    continue
                life, nbytes = self.lives[u], graph.values[u].nbytes
                again = j == k and life.born < n and life.born in schedule.recomputed[k]
                if again and k not in life.by_stage and u not in (cloned | schedule.saved):
                    cloned.add(u)
                    parts.append(((("r", life.born, k), ("r", m, j)), nbytes))
                held = ("h", u, k)
                if j == k and (u, k) in schedule.kept and held not in counted:
                    counted.add(held)
                    parts.append(((held, ("r", m, j)), nbytes))
        # Earlier recomputation counts too if it is in a loop, which keeps its operands until it ends.
        for j in range(stage + 1):
            loop = graph.nodes[graph.stages[j].start].loop
            for m in schedule.recomputed[j] if loop >= 0 else ():
                for u in graph.reads[m]:
                    if graph.kept_until(u, loop) >= at:
                        original(u, m, j)
        constant = terms.constant_nbytes
        if k >= 0:
            again = ("r", n, k)
            made = sum(self._made(n)) + sum(
                graph.values[v].nbytes for v in graph.nodes[n].outputs if graph.values[v].is_output
            )
            parts.append(((again,), made + graph.nodes[n].workspace_nbytes))
        return Terms(constant, tuple(parts))


def _without_idle_pairs(terms: Terms, held: frozenset[Key]) -> Terms:
    """Return the bound without pairs of values that are not kept: `x + y - 1` is negative if neither is one."""
    parts = ((keys, b) for keys, b in terms.parts if len(keys) == 1 or keys[0][0] != "h" or keys[0] in held)
    return Terms(terms.constant_nbytes, tuple(parts))
