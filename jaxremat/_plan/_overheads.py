"""Search, its best trial -> what to say of its time, and the same with other fences, if that is faster."""

from .._emit._emit import FENCES
from .._runtime._bytes import format_nbytes
from ._search import MOST_OVERHEAD, Search
from ._trial import Trial


def dear(search: Search, trial: Trial) -> str:
    """What to say of a plan that takes several times as long as the plain step; "" of others."""
    step = search.graph.step_seconds or 1.0
    if trial.seconds <= MOST_OVERHEAD * step:
        return ""
    times = 1 + trial.seconds / step
    said = f"the cheapest plan found within this budget takes {times:.1f} times the plain step's time."
    cheaper = [t for t in search.trials if t.seconds <= MOST_OVERHEAD * step]
    if not cheaper:
        return f"{said} Use a larger budget, or a smaller batch."
    near = min(cheaper, key=lambda t: t.peak_nbytes)
    return (
        f"{said} It is {1 + near.seconds / step:.1f} times with {near.peak_nbytes} bytes "
        f"({format_nbytes(near.peak_nbytes)}): use that budget, or a smaller batch."
    )


def reformed(search: Search, trial: Trial, budget: int) -> Trial:
    """The trial, or the same schedule with another form of fences, if its compiled program is faster and fits."""
    for fence in FENCES:
        if fence != trial.fence and trial.profile.extra_seconds > 0:
            search.reform(trial, fence)
    same = [t for t in search.trials if t.solution is trial.solution and t.peak_nbytes <= budget]
    return min(same, key=lambda t: t.compiled_overhead)
