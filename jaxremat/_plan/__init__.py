"""Program, budget -> the cheapest plan that the compiler confirms to fit.

In: `Program`, arguments, a request. Out: `Plan` and a compiled step, or an error. Law: the compiler confirms that a
returned plan fits the budget.

Reading order: `_request` (with `Planning`, which users write), `_problem` (a step and its arguments, nothing compiled),
`_rules` (which parts of it may take other forms), `_baseline` (the plain step compiled, where all plans start, and the
graphs of its variants); `_verify` (a request answered), `_search` (which candidate next, and when to stop) with
`_candidates`, `_ledger` (what was solved and compiled) and `_step_compiler`; `_planned` (a plan followed, and corrected
where it needs more on this machine), `_nearby` (a plan made from that of a similar step); `_refusal` (errors where
nothing fits, or where pins prevent it), `_state_on_host` (arguments moved to host memory then), `_defects` (variants
that cannot be built); `_made_for`, `_plan`, `_plan_cache`, `_agreement` (one plan in several processes), `_frontier`;
`_residuals` (functions that are differentiated later); `_arguments`.
"""
