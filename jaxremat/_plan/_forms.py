"""Plain step and its graph -> the `Forms` that it may take: what each kind of its sites offers, priced.

`OFFERS` has a function for each kind of sites but loops: None where the step has none, or the user decides about them.
"""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax.extend.core as jex

from .._attention._finding import Site, attention
from .._attention._kernels import LEAST_CAPABILITY, gradient_fits, kernels_seconds
from .._compiler._devices import DeviceSpec
from .._compiler._tried_kernels import kernels_work
from .._model._attention_offers import AttentionOffers
from .._model._copy_offers import CopyOffers
from .._model._form import ATTENTION, Worth
from .._model._form_offers import REVERSIBLE, Forms, Offers
from .._model._graph import Graph
from .._model._inner_offers import InnerOffers
from .._model._loop_levels import LoopOffers
from .._model._reversed_offers import ReversedOffers
from .._model._row_offers import RowOffers
from .._model._schedule import everything
from .._model._simulate import simulate
from .._program._flops import alone_seconds, aval_nbytes
from .._program._primitives import is_heavy
from .._rewrite._encodings import allowed, fewer_nbytes
from .._rewrite._flat_program import BACKWARD, FORWARD, alive
from .._rewrite._inner_loops import fewer_nbytes as inner_nbytes
from .._rewrite._inner_loops import inner_pairs
from .._rewrite._laid_open import closed_loop
from .._rewrite._reversed_chains import chains
from .._rewrite._reversed_loops import reversible_nbytes
from .._rewrite._row_regions import Region
from .._rewrite._trace import Traced

ROW_COPIES = 2
"""How often a row that is written over another is written and read for that alone."""


@dataclass(frozen=True)
class Sites:
    """The plain step, whose sites may be done otherwise.

    **Fields:** `traced`, and `there` as one device has it; `graph`; `device`, and `here` the GPU if it is at hand;
    what is allowed by `allow`; `decided` whether the user says what is saved.
    """

    traced: Traced
    there: Traced
    graph: Graph
    device: DeviceSpec
    here: Any
    allow: Collection[str]
    decided: bool


def forms(sites: Sites) -> Forms:
    """The forms that a step may take."""
    offered = (offers(sites) for offers in OFFERS)
    there = tuple(offers for offers in offered if offers is not None)
    alone = sites.traced.attention_places is None  # of chunks it is not known where each device's part lies
    return Forms(_loops(sites), there, in_chunks=(ATTENTION,) if alone else ())


def _loops(sites: Sites) -> LoopOffers:
    traced, bandwidth = sites.traced, sites.device.bandwidth
    absorbing = [(g.fewer_nbytes, ROW_COPIES * g.written_nbytes / bandwidth) for g in traced.gains]
    return LoopOffers.of(sites.graph, traced.lengths, traced.cuttable, absorbing)


def _rows(sites: Sites) -> Offers | None:
    """Rows, and most of the step, in chunks."""
    if sites.decided:
        return None
    return RowOffers(
        tuple(
            {chunks: _chunked(sites, region, chunks) for chunks in region.choices}
            if ("microbatches" if region.whole else "rows") in sites.allow
            else {}
            for region in sites.traced.regions
        )
    )


def _chunked(sites: Sites, region: Region, chunks: int) -> Worth:
    """What becomes of a region in so many chunks."""
    graph, device = sites.graph, sites.device
    fewer, more = region.fewer_nbytes(chunks), region.more_seconds(chunks, device)
    if region.whole:
        temporaries = simulate(graph, everything(graph)).peak_nbytes - graph.base_nbytes
        fewer = max(min(fewer, temporaries - temporaries // chunks) - region.sum_nbytes, 0)
        trips = graph.total_trips
        launched = sum(trips[n.loop] if n.loop >= 0 else 1 for n in graph.kernels())
        more += (chunks - 1) * max(launched - region.kernels, 0) * device.launch_seconds
    return Worth(fewer, more, region.whole)


def _inner(sites: Sites) -> Offers | None:
    """Pairs of loops inside of pairs laid open."""
    traced, there = sites.traced, sites.there
    found = inner_pairs(traced.jaxpr.jaxpr.eqns, traced.loop_of, traced.loops)
    fewer = inner_nbytes(there.jaxpr.jaxpr.eqns, found)
    if not fewer or sites.decided:
        return None
    nodes = (sites.graph.nodes[i] for i in set(found.values()))
    again = (n for n in nodes if traced.loops[n.loop].role == FORWARD)
    return InnerOffers(fewer, math.fsum(n.seconds for n in again))


def _attention(sites: Sites) -> Offers | None:
    """Attention without its matrix of scores."""
    traced, graph, device = sites.traced, sites.graph, sites.device
    if sites.decided or "attention" not in sites.allow:
        return None
    closed, places = traced.jaxpr, traced.attention_places
    found = attention(closed, traced.program.scopes, [True] * len(traced.loop_of))
    found = [site for site in found if places is None or site.pattern in places]
    trips_of = _trips_of(traced, graph)
    within = [] if places is not None else list(_attention_inside(closed, trips_of))
    if not (found or within):
        return None
    able = device.chip is not None and device.chip.capability >= LEAST_CAPABILITY
    if able and sites.here is not None:
        able = kernels_work([*found, *(site for site, _, _ in within)], sites.here)
    how = 2 if able else 1
    fewer, more = 0, 0.0
    for site in found:
        loop = traced.loop_of[site.at]
        length, trips = graph.loop_lengths[loop] if loop >= 0 else 1, trips_of[site.at]
        pattern = places[site.pattern].part(site.pattern) if places is not None else site.pattern
        values = (graph.values[v] for i in site.forward for v in graph.nodes[i].outputs)
        large = (v.nbytes for v in values if v.materialised and v.nbytes >= pattern.scores_nbytes)
        fewer += length * max(sum(large), pattern.scores_nbytes)
        once, back = (
            math.fsum(graph.nodes[i].seconds for i in each) for each in (site.forward, site.backward)
        )
        differentiated = site.gradient is not None
        if how > 1 and gradient_fits(pattern, [a.aval for a in (*site.operands, *site.leaves)]):
            more += trips * kernels_seconds(pattern, device, gradient=differentiated) - once - back
        elif differentiated:
            more += once
    for site, eqns, trips in within:
        fewer = max(fewer, site.pattern.scores_nbytes)
        if how > 1:
            once = math.fsum(alone_seconds(device, eqns[i]) for i in site.forward if is_heavy(eqns[i]))
            more += trips * (kernels_seconds(site.pattern, device, gradient=False) - once)
    return AttentionOffers(how, fewer, more)


def _trips_of(traced: Traced, graph: Graph) -> list[int]:
    """How often each equation of a step runs."""
    trips = graph.total_trips
    return [trips[loop] if loop >= 0 else 1 for loop in traced.loop_of]


def _attention_inside(
    closed: jex.ClosedJaxpr, trips: Sequence[int]
) -> Iterator[tuple[Site, Sequence[jex.JaxprEqn], int]]:
    """Attention in the bodies of loops that are not laid open, with the equations of each and how often it is done.

    **Arguments:** `trips` how often each equation runs.
    """
    for eqn, around in zip(closed.jaxpr.eqns, trips, strict=True):
        if (body := closed_loop(eqn)) is not None:
            often = around * eqn.params["length"]
            for site in attention(body, [-1] * len(body.jaxpr.eqns), alive(body)):
                yield site, body.jaxpr.eqns, often
            yield from _attention_inside(body, [often] * len(body.jaxpr.eqns))


def _copies(sites: Sites) -> Offers | None:
    """Values in fewer bits."""
    traced, codes = sites.traced, allowed(sites.allow, sites.traced.devices)
    if not codes or sites.decided or traced.around:
        return None
    found = fewer_nbytes(sites.there.jaxpr.jaxpr, traced.loop_of, traced.loops, codes)
    return CopyOffers(codes, found) if found else None


def _reversed(sites: Sites) -> Offers | None:
    """Blocks undone on the way back."""
    traced, graph = sites.traced, sites.graph
    if REVERSIBLE not in sites.allow or sites.decided or traced.around or traced.devices > 1:
        return None
    found: dict[int, Worth] = {}
    for number, loop in enumerate(graph.pairs):
        backward = [each.eqn for each in traced.loops if each.group == loop and each.role == BACKWARD]
        carried = reversible_nbytes(traced.loops[loop].eqn, backward[0]) if len(backward) == 1 else 0
        if carried:
            again = math.fsum(node.seconds for node in graph.nodes if node.loop == loop)
            found[number + 1] = Worth(graph.loop_lengths[loop] * carried, again)
    blocks = [block for chain in chains(traced.jaxpr, traced.loop_of, traced.loops) for block in chain]
    if blocks:
        fewer = sum(aval_nbytes(v.aval) for block in blocks for v in block.names)
        again = math.fsum(alone_seconds(sites.device, e) for b in blocks for e in b.eqns if is_heavy(e))
        found[0] = Worth(fewer, again)
    return ReversedOffers(found) if found else None


OFFERS: Sequence[Callable[[Sites], Offers | None]] = (_attention, _rows, _inner, _copies, _reversed)
"""What kinds of sites offer, those of exact forms first."""
