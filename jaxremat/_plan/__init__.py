"""Program, budget -> the cheapest plan that the compiler confirms to fit.

In: `Program`, arguments, a request. Out: `Plan` and a compiled step. Law: what is returned was compiled and held
against the budget, or is an error that says what is true.

Reading order: `_request` (with `Planning`, which users write), `_problem` (a step and its arguments, nothing compiled),
`_rules` (what may be done otherwise in it), `_baseline` (the same compiled, where all plans start, and the graphs of
its variants); `_verify` (a request answered), `_search` (which candidate next, and when to stop) with `_candidates`,
`_ledger` (what was solved and compiled) and `_step_compiler`; `_planned` (a plan followed, and corrected where it needs
more here), `_nearby` (a plan made from that of nearly the same step); `_refusal` (what to say where nothing fits, and
of pins that stand in the way), `_state_on_host` (what to do then), `_defects` (variants that cannot be made);
`_made_for`, `_plan`, `_plan_cache`, `_agreement` (one plan in several processes), `_frontier`; `_residuals` (functions
that are differentiated later); `_arguments`.
"""
