"""Program, budget -> the cheapest plan that the compiler confirms to fit.

In: `Program`, arguments, a request. Out: `Plan` and a compiled step, or an error. Invariant: the compiler confirms that
a returned plan fits the budget.

Reading order: `_request` (with `Planning`, which users write), `_problem` (a step and its arguments, not compiled),
`_rules` (the parts of the step that have other forms), `_baseline` (the compiled plain step, where all plans start, and
the graphs of its variants); `_verify` (answers a request), `_search` (picks the next candidate, and stops) with
`_candidates`, `_ledger` (the record of solves and compilations) and `_step_compiler`; `_planned` (applies a plan, and
corrects it if it needs more on this machine), `_nearby` (adapts the plan of a similar step); `_refusal` (errors if
nothing fits, or if pins prevent it), `_state_on_host` (then moves arguments to host memory), `_defects` (variants that
cannot be built); `_made_for`, `_plan`, `_plan_cache`, `_agreement` (one plan in several processes), `_frontier`;
`_residuals` (functions that are differentiated later); `_arguments`.
"""
