"""Forms of steps, by what is done with each pair of loops or region of rows in order."""

from jaxremat._model._form import LOOP, ROWS, Form, Setting


def of_levels(*settings: Setting) -> Form:
    """Pairs of loops with these lengths by level and part, none for one that stays as it is."""
    return Form.of_kind(LOOP, dict(enumerate(settings)))


def of_chunks(*counts: int) -> Form:
    """Regions of rows in so many chunks, 0 for one that stays as it is."""
    return Form.of_kind(ROWS, {site: (count,) for site, count in enumerate(counts) if count})
