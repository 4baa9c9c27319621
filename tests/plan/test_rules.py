"""The table of rules: what each names is there, and how often they are asked."""

from collections import Counter
from typing import Any

import jax.numpy as jnp
import pytest
from chains import train

import jaxremat
from jaxremat._emit._validation import UNPROVED
from jaxremat._model._variant import INSIDE, LOOP
from jaxremat._plan import _baseline, _rules
from jaxremat._plan._rules import RULES, Rule
from jaxremat._rewrite._passes import FORM_PASSES


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_is_followed_by_passes_and_has_words(rule: Rule) -> None:
    assert rule.apply and set(rule.apply) <= {each.name for each in FORM_PASSES}
    assert rule.name in UNPROVED


def test_every_rule_that_may_not_be_proved_is_in_the_table() -> None:
    assert {*(rule.name for rule in RULES), INSIDE, LOOP} == set(UNPROVED)


@pytest.mark.parametrize("verify", [True, False])
def test_a_plan_looks_for_sites_once(verify: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = Counter[str]()

    def counting(name: str, of: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return of(*args, **kwargs)

        return counted

    monkeypatch.setattr(_baseline, "variants", counting("variants", _baseline.variants))
    monkeypatch.setattr(_rules, "attention", counting("attention", _rules.attention))
    args = [jnp.ones((64, 64))] * 8, jnp.ones((1024, 64))
    planning = jaxremat.Planning(verify=verify)
    plan = jaxremat.plan(train, *args, budget="80% of temporaries", donate_argnums=0, planning=planning)
    assert plan.stages
    assert counts == {"variants": 1, "attention": 1}
