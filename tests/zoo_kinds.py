"""Small train steps of the kinds that people write, one per part and per way of `examples.benchmarks.random_steps`."""

from zoo import Case

from examples.benchmarks.random_steps import NETS, WAYS, step_of

SECOND = {"penalised": ("dense", "layers"), "curved": ("solved",), "linearized": ("associative", "layers")}
"""The parts of nets that are differentiated more than once; of others all kinds."""


def _case(way: str, *parts: str) -> Case:
    step = step_of(way, parts)
    return Case(step.name, step.fn, lambda: step.args)


KINDS = {
    case.name: case
    for case in (
        *(_case("plain", part) for part in NETS),
        *(_case(way, *SECOND.get(way, ("layers", "dense"))) for way in WAYS if way != "plain"),
        _case("accumulated", "smoother", "layers"),
        _case("policy", "equilibrium"),
        _case("meta", "recurrent"),
        _case("linearized", "smoother"),
    )
}
