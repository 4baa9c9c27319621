"""What the kinds of sites offer -> the forms of a step that are worth making, deeper and deeper.

A kind of sites (pairs of loops, regions of rows, values that may have copies) is an `Offers`: which choices it has, and
what each promises. Law: the search knows no kind but loops, which it may divide as it likes; a form is worth the sum of
its choices.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from ._form import PLAIN, Choice, Form, Setting, Worth
from ._loop_levels import LoopOffers

EXACT = ("attention", "microbatches", "rows")
"""What users may allow of exact forms: attention without its matrix of scores, all of the step for a part of the batch
after the others, and some of its rows so.
"""

REVERSIBLE = "reversible"
"""What they may allow besides: blocks undone on the way back, whose values are those of the forward pass but for
rounding.
"""


class Offers(Protocol):
    """What one kind of sites offers.

    **Fields:** `kind` its name in a `Choice`; `exact` whether all is computed as before, but for the order of sums.
    """

    kind: ClassVar[str]
    exact: ClassVar[bool]

    def rungs(self) -> Sequence[tuple[Choice, ...]]:
        """Choices that are worth making together, deeper and deeper."""
        ...

    def worth(self, site: int, setting: Setting) -> Worth:
        """What such a choice is worth."""
        ...


@dataclass(frozen=True, slots=True)
class Promise:
    """A form and what it is worth: fields as of `Worth`."""

    form: Form
    fewer_nbytes: int
    more_seconds: float
    whole: bool = False


@dataclass(frozen=True)
class Forms:
    """The forms that a step may take.

    **Fields:** what its `loops` offer, and the `others`; the kinds of those that most of the step may have `in_chunks`.
    """

    loops: LoopOffers
    others: tuple[Offers, ...] = ()
    in_chunks: tuple[str, ...] = ()

    @property
    def offers(self) -> tuple[Offers, ...]:
        """Of all kinds, those of loops last: they are the largest, and what saves most of the others goes with each."""
        return (*self.others, self.loops)

    def promise(self, form: Form) -> Promise:
        """What a form is worth."""
        fewer, more, whole = 0, 0.0, False
        for offers in self.offers:
            for site, setting in form.settings(offers.kind).items():
                worth = offers.worth(site, setting)
                fewer += worth.fewer_nbytes
                more += worth.more_seconds
                whole |= worth.whole
        return Promise(form, fewer, more, whole)

    def deeper(self) -> tuple[Promise, ...]:
        """Deeper and deeper exact forms: those of each kind in turn, alone and with what saves most of the kinds
        before; those of most of the step behind all that is cheaper, alone and with what chunks may have besides.
        """
        parts: list[Promise] = []
        wholes: list[Promise] = []
        before = PLAIN
        for offers in self.offers:
            if not offers.exact:
                continue
            rungs = [self.promise(Form.of(*rung)) for rung in offers.rungs()]
            within = [choice for choice in before.choices if choice.kind in self.in_chunks]
            for whole in (rung for rung in rungs if rung.whole):
                wholes += [whole, *([self.promise(whole.form.also(*within))] if within else [])]
            rungs = [rung for rung in rungs if not rung.whole]
            for rung in rungs:
                parts.append(rung)
                if before:
                    parts.append(self.promise(before.also(*rung.form.choices)))
            before = before.also(*(rungs[-1].form.choices if rungs else ()))
        for whole in wholes:
            cheaper = [i for i, other in enumerate(parts) if other.more_seconds <= whole.more_seconds]
            parts.insert(max(cheaper, default=-1) + 1, whole)
        return tuple(parts)

    def inexact(self) -> tuple[Promise, ...]:
        """The plain form, and deeper and deeper ones but for those of most of the step, with what changes numbers."""
        plain = [PLAIN, *(deeper.form for deeper in self.deeper() if not deeper.whole)]
        rungs = [rung for offers in self.others if not offers.exact for rung in offers.rungs()]
        return tuple(map(self.promise, dict.fromkeys(form.also(*rung) for rung in rungs for form in plain)))

    def is_inexact(self, form: Form) -> bool:
        """Whether any of its choices changes numbers."""
        return any(not offers.exact and form.settings(offers.kind) for offers in self.others)

    def divided(self, form: Form, pair: int, share: float) -> list[Promise]:
        """The forms with this pair of loops in parts, see `LoopOffers.divided`."""
        return [self.promise(form.also(choice)) for choice in self.loops.divided(pair, share)]


def saving(promises: Iterable[tuple[Choice, Worth]]) -> list[Choice]:
    """Of choices those that save more than all that cost less, the cheapest first."""
    found: list[tuple[Choice, Worth]] = []
    for choice, worth in sorted(promises, key=lambda each: each[1].more_seconds):
        if not found or worth.fewer_nbytes > found[-1][1].fewer_nbytes:
            found.append((choice, worth))
    return [choice for choice, _ in found]
