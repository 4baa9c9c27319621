"""Small train steps of the kinds that people write, one per part and per way of `random_steps`, odd ones left out."""

from odd_ways import ODD_WAYS
from random_nets import ONE, STACKED
from random_steps import WAYS, step_of
from zoo import Case

SECOND = {"penalised": ("dense", "layers"), "curved": ("solved",), "linearized": ("associative", "layers")}
"""The parts of nets that are differentiated more than once; of others all kinds."""


def _case(way: str, *parts: str) -> Case:
    step = step_of(way, parts)
    return Case(step.name, step.fn, lambda: step.args)


KINDS = {
    case.name: case
    for case in (
        *(_case("plain", part) for part in ONE | STACKED),
        *(
            _case(way, *SECOND.get(way, ("layers", "dense")))
            for way in WAYS
            if way not in {"plain", *ODD_WAYS}
        ),
        _case("accumulated", "smoother", "layers"),
        _case("policy", "equilibrium"),
        _case("meta", "recurrent"),
        _case("linearized", "smoother"),
    )
}
