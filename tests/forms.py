"""Forms of steps, by what is done with each pair of loops or region of rows in order."""

from jaxremat._model._variant import LOOP, ROWS, Variant


def of_levels(*settings: tuple[int, ...]) -> Variant:
    """Pairs of loops with these lengths by level and part, none for one that stays as it is."""
    return Variant.of_rule(LOOP, dict(enumerate(settings)))


def of_chunks(*counts: int) -> Variant:
    """Regions of rows in so many chunks, 0 for one that stays as it is."""
    return Variant.of_rule(ROWS, {site: (count,) for site, count in enumerate(counts) if count})
