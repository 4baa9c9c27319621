"""Estimates of each rule's effect on a step -> the variants of the step that are worth planning.

Invariant: the estimate of a variant is the sum of its choices' estimates. The search treats only one rule specially,
that of loops, whose levels it chooses.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from ._graph import Graph
from ._loop_levels import Loops
from ._variant import INSIDE, PLAIN, Choice, Estimate, Variant

EXACT = ("attention", "microbatches", "rows")
"""The exact transformations, the default of `allow`: they draw the same random numbers, and change only the order of
sums.
"""

REVERSIBLE = "reversible"
"""Blocks undone in the backward pass, whose values equal the forward pass's up to rounding; off by default."""


@dataclass(frozen=True)
class Sites:
    """The sites of one rule in a step.

    **Fields:** `rule`; the `estimates` of each site and setting; `exact` whether results change only by the order of
    sums; `together` whether all sites are chosen at once, rather than one of them.
    """

    rule: str
    estimates: Mapping[tuple[int, tuple[int, ...]], Estimate]
    exact: bool = True
    together: bool = False

    def rungs(self) -> list[tuple[Choice, ...]]:
        """Return sets of choices worth combining, each saving more than the one before; choices of most of the step are
        not combined, and come last.
        """
        if self.together:
            return [tuple(Choice(self.rule, *each) for each in sorted(self.estimates))]
        return [*self._levelled(), *((choice,) for choice in self._saving(whole=True))]

    def _levelled(self) -> list[tuple[Choice, ...]]:
        """Return sets of choices, each of which halves the bytes still to be saved at the site where they are most.

        Sites are in memory at different times, so the largest of them determines the step's peak: savings at a smaller
        site are worth nothing.
        """
        choices = self._saving(whole=False)
        of_site = {site: [c for c in choices if c.site == site] for site in {c.site for c in choices}}
        most = {site: self.estimate(own[-1]).fewer_nbytes for site, own in of_site.items()}
        left = dict(most)
        found: list[tuple[Choice, ...]] = []
        chosen: dict[int, Choice] = {}
        level = max(left.values(), default=0)
        while level > 0:
            for site in sorted(left, key=lambda site: (-left[site], site)):
                while left[site] > level / 2:
                    chosen[site] = of_site[site].pop(0)
                    left[site] = most[site] - self.estimate(chosen[site]).fewer_nbytes
            found.append(tuple(chosen[site] for site in sorted(chosen)))
            level = max(left.values())
        return found

    def _saving(self, *, whole: bool) -> list[Choice]:
        """Return the choices of each site that save more than every faster one there (anywhere, if `whole`)."""
        found: dict[Choice, int] = {}
        able = (each for each in self.estimates.items() if each[1].whole == whole)
        for (site, setting), estimate in sorted(able, key=lambda each: each[1].more_seconds):
            most = max((n for choice, n in found.items() if choice.site == site or whole), default=-1)
            if estimate.fewer_nbytes > most:
                found[Choice(self.rule, site, setting)] = estimate.fewer_nbytes
        return list(found)

    def estimate(self, choice: Choice) -> Estimate:
        """Return the estimate of one choice, or an empty one if there is none, as for a plan of another version."""
        return self.estimates.get(choice[1:], Estimate())


NOTHING = Sites(INSIDE, {})
"""No site inside chunks."""


@dataclass(frozen=True)
class Variants:
    """The variants that a step may take.

    **Fields:** the `loops`, and the `others` of its sites; `in_chunks` the rules that may apply within most of the step
    in chunks; `sites_inside` searches for sites in the program that has most of the step in chunks, as a choice says;
    `required` a variant whose sites are changed in all variants, for instance because the compiler accepts no other;
    `negligible_seconds`: a variant that saves less is dropped if another is slower by no more than this.
    """

    loops: Loops
    others: tuple[Sites, ...] = ()
    in_chunks: tuple[str, ...] = ()
    sites_inside: Callable[[Choice], Sites] = lambda _: NOTHING
    required: Variant = PLAIN
    negligible_seconds: float = 0.0

    @property
    def sites(self) -> tuple[Sites | Loops, ...]:
        """The sites of all rules. Loops are last: they are the largest, and the best choices of the others combine with
        each of their levels.
        """
        return (*self.others, self.loops)

    def estimate(self, variant: Variant) -> Estimate:
        """Return the estimate of a variant."""
        found = Estimate()
        for sites in self.sites:
            for choice in variant.choices:
                if choice.rule == sites.rule:
                    found = found.plus(sites.estimate(choice))
        for choice in variant.choices if variant.settings(INSIDE) else ():
            if choice.rule == INSIDE:
                found = found.plus(self._inside(variant).estimate(choice))
        return found

    def sketch(self, plain: Graph, variant: Variant) -> Graph | None:
        """Return the plain graph with the values that a variant divides reduced to one part each.

        It shows what is left to be saved or recomputed, without the variant's extra time. None if it is not known which
        values are divided.
        """
        chosen = [
            (sites, choice) for choice in variant.choices for sites in self.sites if sites.rule == choice.rule
        ]
        estimates = [sites.estimate(choice) for sites, choice in chosen]
        divided = [each.divided for each in estimates]
        if len(chosen) < len(variant.choices) or not all(divided):
            return None
        values = [*plain.values]
        for v, parts in chain.from_iterable(divided):
            if not values[v].is_output:
                values[v] = replace(values[v], nbytes=values[v].nbytes // parts if parts else 0)
        base = plain.base_nbytes + sum(each.sum_nbytes for each in estimates)
        return replace(plain, values=tuple(values), base_nbytes=base)

    def inside(self, variant: Variant) -> list[Variant]:
        """Return variants of one with most of the step in chunks, with sites inside these in smaller chunks: searched
        for in the variant's program, since each number of chunks has another.
        """
        if variant.settings(INSIDE) or not self.estimate(variant).whole:
            return []
        return [variant.also(*rung) for rung in self._inside(variant).rungs()]

    def _inside(self, variant: Variant) -> Sites:
        others = (each for each in variant.choices if each.rule != INSIDE)
        whole = (each for each in others if self.estimate(Variant.of(each)).whole)
        return next(map(self.sites_inside, whole), NOTHING)

    def exact(self) -> tuple[Variant, ...]:
        """Return exact variants, ever deeper.

        These are the variants of each rule in turn, by themselves and with the best of the rules before. Variants of
        most of the step come after all that are cheaper, by themselves and with the choices that chunks may have. If
        the rules before cost nothing, a rule's variants by themselves come last: for steps in which the others are
        impossible.
        """
        found: list[Variant] = []
        wholes: list[Variant] = []
        without: list[Variant] = []
        before = PLAIN
        for sites in self.sites:
            if not sites.exact:
                continue
            within = [choice for choice in before.choices if choice.rule in self.in_chunks]
            last: tuple[Choice, ...] = ()  # the deepest choices of this rule, which later rules build on
            for rung in sites.rungs():
                variant = Variant.of(*rung)
                if self.estimate(variant).whole:
                    wholes += [variant, *([variant.also(*within)] if within else [])]
                else:
                    free = before and self.estimate(before).more_seconds <= 0
                    (without if free else found).append(variant)
                    found += [before.also(*variant.choices)] if before else []
                    last = variant.choices
            before = before.also(*last)
        for whole in wholes:
            seconds = self.estimate(whole).more_seconds
            cheaper = [i for i, each in enumerate(found) if self.estimate(each).more_seconds <= seconds]
            found.insert(max(cheaper, default=-1) + 1, whole)
        return self._worthwhile((*found, *without))

    def _worthwhile(self, variants: Sequence[Variant]) -> tuple[Variant, ...]:
        """Return the variants with all required sites, except those replaced by one that saves more for at most
        negligible time.
        """
        sites = {choice[:2] for choice in self.required.choices}
        able = [each for each in variants if sites <= {choice[:2] for choice in each.choices}]
        if self.negligible_seconds:
            of = {each: self.estimate(each) for each in able}
            able = [each for each in able if not any(self._replaces(of[o], of[each]) for o in able)]
        return tuple(able)

    def _replaces(self, other: Estimate, one: Estimate) -> bool:
        more = other.more_seconds - one.more_seconds
        return (
            other.fewer_nbytes > one.fewer_nbytes
            and more <= self.negligible_seconds
            and other.whole == one.whole
        )

    def deepest(self) -> tuple[Variant, ...]:
        """Return the best choice of each exact rule in turn, with the best of the rules before; none of most of the
        step.
        """
        found = [PLAIN]
        for sites in self.sites:
            rungs = (Variant.of(*rung) for rung in (sites.rungs() if sites.exact else ()))
            for rung in [each for each in rungs if not self.estimate(each).whole][-1:]:
                found.append(found[-1].also(*rung.choices))
        return tuple(found[1:])

    def inexact(self) -> tuple[Variant, ...]:
        """Return variants that change numbers: with the step as written, and with the exact variants, except those of
        most of the step.
        """
        exact = [PLAIN, *(each for each in self.exact() if not self.estimate(each).whole)]
        rungs = [rung for sites in self.others if not sites.exact for rung in sites.rungs()]
        found = dict.fromkeys(variant.also(*rung) for rung in rungs for variant in exact)
        return self._worthwhile(tuple(found)) if self.required else tuple(found)

    def is_inexact(self, variant: Variant) -> bool:
        """Return whether any choice of a variant changes numbers."""
        return any(not sites.exact and variant.settings(sites.rule) for sites in self.others)
