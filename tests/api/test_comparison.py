"""What is said of how far the results of two steps are apart."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxremat._api._comparison import Comparison, differences


def plain(x: jax.Array) -> list[jax.Array]:
    """A sum, what is zero but for rounding, its square, and a number of steps."""
    nothing = jnp.sum(x * 1e-3) - jnp.sum((x * 1e-3)[::-1])
    return [jnp.sum(x), nothing, nothing**2, jnp.int32(1_000_000_000)]


def compared(*more: float) -> Comparison:
    x = jnp.linspace(0.0, 1.0, 1001)

    def planned(x: jax.Array) -> list[jax.Array]:
        return [a + jnp.asarray(b, a.dtype) for a, b in zip(plain(x), more, strict=True)]

    return Comparison(tuple(differences(plain, planned, (x,), {}, 1e-3)))


def test_rounding_agrees() -> None:
    found = compared(1e-4, 1e-8, 1e-14, 0)
    assert found.agrees
    assert str(found).splitlines()[0] == "4 results differ by no more than rounding explains:"
    assert "differs" not in str(found)


def test_what_differs_is_said_first() -> None:
    found = compared(1.0, 0.0, 0.0, 1)
    assert [leaf.agrees for leaf in found.leaves] == [False, True, True, False]
    first, *lines = str(found).splitlines()
    assert first == "2 of 4 results differ by more than rounding explains:"
    assert [line.endswith("differs") for line in lines] == [True, True, False, False]


def test_no_results() -> None:
    assert Comparison(()).agrees
    assert str(Comparison(())) == "0 results differ by no more than rounding explains:"


def test_many_results_are_cut_short() -> None:
    leaf = compared(1.0, 0.0, 0.0, 1).leaves[0]
    assert str(Comparison((leaf,) * 25)).splitlines()[-1] == "... and 5 more in `leaves`"
    assert len(str(Comparison((leaf,) * 25)).splitlines()) == 22


def test_signs_of_what_is_rounding_are_told_from_errors() -> None:
    """Lion and the first step of Adam follow the sign of a gradient; where it is rounding, so is the update."""
    x = jnp.nextafter(jnp.float32(-1.0), -jnp.inf)

    def signs(flip: float) -> Callable[[jax.Array], list[jax.Array]]:
        def step(x: jax.Array) -> list[jax.Array]:
            return [x, jnp.sign(x + 1), flip * jnp.ones(3)]

        return step

    def said(planned: float) -> str:
        return str(Comparison(tuple(differences(signs(1.0), signs(planned), (x,), {}, 1e-3))))

    assert "Rounding alone moves 1 of 3 results" in said(-1.0)
    assert "Rounding alone" not in said(1.0)
    assert "Rounding alone" not in said(1.5)
