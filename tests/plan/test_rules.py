"""The table of rules: what each names is there."""

import pytest

from jaxremat._emit._validation import UNPROVED
from jaxremat._model._variant import LOOP
from jaxremat._plan._rules import RULES, Rule
from jaxremat._rewrite._passes import FORM_PASSES


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_is_followed_by_passes_and_has_words(rule: Rule) -> None:
    assert rule.apply and set(rule.apply) <= {each.name for each in FORM_PASSES}
    assert rule.name in UNPROVED


def test_every_rule_that_may_not_be_proved_is_in_the_table() -> None:
    assert {*(rule.name for rule in RULES), LOOP} == set(UNPROVED)
