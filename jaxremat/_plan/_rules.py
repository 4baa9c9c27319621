"""Step as written -> the variants that it may take: the sites and settings of each rule in a table, with estimates.

To add a form of the step, add a rule to `RULES` and its pass to `_rewrite._passes.FORM_PASSES`.
"""

import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax.extend.core as jex

from .._attention._finding import Site, attention
from .._attention._kernels import LEAST_CAPABILITY, gradient_fits, kernels_seconds
from .._compiler._devices import DeviceSpec
from .._compiler._single_equation import kernels_work
from .._model._graph import Graph
from .._model._loop_levels import Loops
from .._model._schedule import save_all
from .._model._simulate import simulate
from .._model._sites import NOTHING, REVERSIBLE, Sites, Variants
from .._model._variant import ATTENTION, COPIES, INNER, INSIDE, REVERSED, ROWS, Choice, Estimate, Variant
from .._program._flops import alone_seconds, aval_nbytes
from .._program._primitives import is_fusion_root
from .._rewrite._encodings import allowed, fewer_nbytes
from .._rewrite._flat_program import BACKWARD, FORWARD, alive
from .._rewrite._inlined_loops import closed_loop
from .._rewrite._inner_loops import fewer_nbytes as inner_nbytes
from .._rewrite._inner_loops import inner_pairs
from .._rewrite._regions import Region
from .._rewrite._reversed_chains import chains
from .._rewrite._reversed_loops import reversible_nbytes
from .._rewrite._trace import Traced

ROW_COPIES = 2
"""Extra reads and writes of a row that is written over another."""


@dataclass(frozen=True)
class PlainStep:
    """The step as written, to which rules apply.

    **Fields:** `traced`, and `there`, the part of one device; `graph`; `device`, and `here`, the GPU if it is present;
    `allow` the allowed forms; `regions_inside` as in `Traced`, None if it fails.
    """

    traced: Traced
    there: Traced
    graph: Graph
    device: DeviceSpec
    here: Any
    allow: Collection[str]
    regions_inside: Callable[[Variant], Sequence[Region] | None]

    @cached_property
    def pinned(self) -> frozenset[int]:
        """The equations that compute a pinned value, and those at which pinned stages begin."""
        values = self.graph.values
        return frozenset(
            pin.at if pin.action == "stage" else values[pin.at].producer for pin in self.graph.pins
        )

    def without_pins(self, region: Region) -> bool:
        """Return whether no pinned value would be inside of the region's loops."""
        if region.loop >= 0:  # the region's equations are numbered within an iteration
            return all(self.traced.loop_of[i] < 0 for i in self.pinned)
        merged, read = self.traced.merged.program.eqns, self.traced.program.read
        inside = {read(v) for i in region.rules for v in merged[i].outvars}
        eqns = self.traced.jaxpr.jaxpr.eqns
        return all(inside.isdisjoint(eqns[i].outvars) for i in self.pinned)


Estimates = Mapping[tuple[int, tuple[int, ...]], Estimate]
"""The estimate of each site and setting of a rule, as in `Sites`."""


class Rule(NamedTuple):
    """A rule by which parts of a step may take another form.

    **Fields:** `name` in a `Choice`; `estimate` returns its sites in a step, with an estimate of each setting; `apply`
    the passes that apply it, by their names in `FORM_PASSES`; `exact` and `together` as in `Sites`.
    """

    name: str
    estimate: Callable[[PlainStep], Estimates]
    apply: tuple[str, ...]
    exact: bool = True
    together: bool = False


def variants(step: PlainStep) -> Variants:
    """Return the variants that a step may take. All of them have the user's pinned values: a site that would hide one
    is left out, and with any pin so are inexact rules.
    """
    found = ((rule, rule.estimate(step)) for rule in RULES if rule.exact or not step.graph.pins)
    sites = tuple(Sites(rule.name, each, rule.exact, rule.together) for rule, each in found if each)
    alone = (
        step.traced.source.attention_places is None
    )  # of chunks it is not known where each device's part lies
    inside = functools.cache(functools.partial(_inside, step))
    return Variants(_loops(step), sites, in_chunks=(ATTENTION,) if alone else (), sites_inside=inside)


def _loops(step: PlainStep) -> Loops:
    traced, bandwidth = step.traced, step.device.bandwidth
    absorbing = [(g.fewer_nbytes, ROW_COPIES * g.written_nbytes / bandwidth) for g in traced.program.gains]
    return Loops.of(step.graph, traced.sites.lengths, traced.sites.cuttable, absorbing)


def _rows(step: PlainStep) -> Estimates:
    """Estimate rows in chunks, and most of the step in microbatches."""
    nodes, places = step.graph.nodes, step.traced.row_places
    with_rows = [[nodes[i].outputs[k] for i, k, _ in of] for of in places]  # none of regions in loops
    return {
        (site, (n,)): _chunked(step, region, n)._replace(divided=tuple((v, n) for v in with_rows[site]))
        for site, region in enumerate(step.traced.sites.regions)
        if ("microbatches" if region.whole else "rows") in step.allow and step.without_pins(region)
        for n in region.choices
    }


def _chunked(step: PlainStep, region: Region, chunks: int) -> Estimate:
    """Estimate a region in a number of chunks."""
    graph, device = step.graph, step.device
    fewer, more, sums = region.fewer_nbytes(chunks), region.more_seconds(chunks, device), 0
    if region.whole:
        sums = region.sum_nbytes
        temporaries = simulate(graph, save_all(graph)).peak_nbytes - graph.base_nbytes
        fewer = max(min(fewer, temporaries - temporaries // chunks) - sums, 0)
        trips = graph.total_trips
        launched = sum(trips[n.loop] if n.loop >= 0 else 1 for n in graph.kernels())
        more += (chunks - 1) * max(launched - region.kernels, 0) * device.launch_seconds
    return Estimate(fewer, more, region.alone, sum_nbytes=sums)


def _inside(step: PlainStep, choice: Choice) -> Sites:
    """Return regions of rows inside microbatches, on one device only: the placement of rows on several is unknown."""
    if "rows" not in step.allow or step.traced.source.devices > 1:
        return NOTHING
    found = enumerate(step.regions_inside(Variant.of(choice)) or ())
    free = not step.pinned
    able = [(i, each) for i, each in found if free or (each.loop >= 0 and step.without_pins(each))]
    estimates = {(site, (n,)): _chunked(step, region, n) for site, region in able for n in region.choices}
    return Sites(INSIDE, estimates)


def _inner(step: PlainStep) -> Estimates:
    """Estimate inlining of pairs of loops inside of pairs: the inner loops' forward passes run once more, unless the
    plain step repeats them in the backward pass already.
    """
    traced = step.traced
    found = inner_pairs(traced.jaxpr.jaxpr.eqns, traced.loop_of, traced.loops)
    fewer = inner_nbytes(step.there.jaxpr.jaxpr.eqns, found)
    nodes = (step.graph.nodes[i] for i in set(found.values()))
    again = (n for n in nodes if traced.loops[n.loop].role == FORWARD)
    return {(0, (1,)): Estimate(fewer, math.fsum(n.seconds for n in again))} if fewer else {}


def _attention(step: PlainStep) -> Estimates:
    """Estimate attention without its matrix of scores: more for the second computation, less for the scores that are
    neither written nor read.
    """
    traced, graph, device = step.traced, step.graph, step.device
    if "attention" not in step.allow:
        return {}
    closed, places = traced.jaxpr, traced.source.attention_places
    found = attention(closed, traced.program.scopes, [True] * len(traced.loop_of))
    found = [site for site in found if places is None or site.pattern in places]
    trips_of = _trips_of(traced, graph)
    within = [] if places is not None else list(_attention_inside(closed, trips_of))
    if any(step.pinned & ((site.forward | site.backward) - {site.at}) for site in found):
        return {}
    if not (found or within):
        return {}
    able = device.chip is not None and device.chip.capability >= LEAST_CAPABILITY
    if able and step.here is not None:
        able = kernels_work([*found, *(site for site, _, _ in within)], step.here)
    how = 2 if able else 1
    fewer, more = 0, 0.0
    gone: list[tuple[int, int]] = []
    for site in found:
        loop = traced.loop_of[site.at]
        length, trips = graph.loop_lengths[loop] if loop >= 0 else 1, trips_of[site.at]
        pattern = places[site.pattern].part(site.pattern) if places is not None else site.pattern
        turns = places[site.pattern].turns if places is not None else 1
        made = (graph.values[v] for i in site.forward | site.backward for v in graph.nodes[i].outputs)
        scores = [v for v in made if v.nbytes >= pattern.scores_nbytes]
        gone += ((v.id, 0) for v in scores if v.producer != site.at)
        large = (v.nbytes for v in scores if v.materialised and v.producer in site.forward)
        fewer += length * max(sum(large), pattern.scores_nbytes)
        once, back = (
            math.fsum(graph.nodes[i].seconds for i in each) for each in (site.forward, site.backward)
        )
        differentiated = site.gradient is not None
        if how > 1 and gradient_fits(pattern, [a.aval for a in (*site.operands, *site.leaves)]):
            seconds = turns * kernels_seconds(pattern, device, gradient=differentiated)
            more += trips * seconds - once - back
        elif differentiated:
            more += once
    for site, eqns, trips in within:
        fewer = max(fewer, site.pattern.scores_nbytes)
        if how > 1:
            once = math.fsum(alone_seconds(device, eqns[i]) for i in site.forward if is_fusion_root(eqns[i]))
            more += trips * (kernels_seconds(site.pattern, device, gradient=False) - once)
    return {(0, (how,)): Estimate(fewer, more, divided=() if within else tuple(gone))}


def _trips_of(traced: Traced, graph: Graph) -> list[int]:
    """Return the number of times that each equation of a step runs."""
    trips = graph.total_trips
    return [trips[loop] if loop >= 0 else 1 for loop in traced.loop_of]


def _attention_inside(
    closed: jex.ClosedJaxpr, trips: Sequence[int]
) -> Iterator[tuple[Site, Sequence[jex.JaxprEqn], int]]:
    """Yield attention sites in the bodies of loops that are not inlined, with the body's equations and the number of
    times that these run. **Arguments:** `trips` the same of each equation of `closed`.
    """
    for eqn, around in zip(closed.jaxpr.eqns, trips, strict=True):
        if (body := closed_loop(eqn)) is not None:
            often = around * eqn.params["length"]
            for site in attention(body, [-1] * len(body.jaxpr.eqns), alive(body)):
                yield site, body.jaxpr.eqns, often
            yield from _attention_inside(body, [often] * len(body.jaxpr.eqns))


def _copies(step: PlainStep) -> Estimates:
    """Estimate values in fewer bits. The graph has the time of encoding and decoding, which are ordinary operations."""
    traced, codes = step.traced, allowed(step.allow, step.traced.source.devices)
    if not codes or traced.around:
        return {}
    fewer = fewer_nbytes(step.there.jaxpr.jaxpr, traced.loop_of, traced.loops, codes)
    return {(0, codes): Estimate(fewer)} if fewer else {}


def _reversed(step: PlainStep) -> Estimates:
    """Estimate blocks whose values the backward pass computes from their results."""
    traced, graph = step.traced, step.graph
    if REVERSIBLE not in step.allow or traced.around or traced.source.devices > 1:
        return {}
    found: dict[tuple[int, tuple[int, ...]], Estimate] = {}
    for number, loop in enumerate(graph.pairs):
        backward = [each.eqn for each in traced.loops if each.group == loop and each.role == BACKWARD]
        carried = reversible_nbytes(traced.loops[loop].eqn, backward[0]) if len(backward) == 1 else 0
        if carried:
            again = math.fsum(node.seconds for node in graph.nodes if node.loop == loop)
            found[number + 1, (1,)] = Estimate(graph.loop_lengths[loop] * carried, again)
    blocks = [block for chain in chains(traced.jaxpr, traced.loop_of, traced.loops) for block in chain]
    if blocks:
        fewer = sum(aval_nbytes(v.aval) for block in blocks for v in block.names)
        again = math.fsum(alone_seconds(step.device, e) for b in blocks for e in b.eqns if is_fusion_root(e))
        found[0, (1,)] = Estimate(fewer, again)
    return found


RULES = (
    Rule(ATTENTION, _attention, ("attention",)),
    Rule(ROWS, _rows, ("rows",)),
    Rule(INNER, _inner, ("loops",)),
    Rule(COPIES, _copies, ("copies",), exact=False),
    Rule(REVERSED, _reversed, ("reversed loops", "reversed chains"), exact=False, together=True),
)
"""The rules in the order in which variants combine them: each is combined with the best settings of those before it.

`LOOP` is the last rule, of the pass "levels". It has so many settings that `Loops` computes them.
"""
