"""Program, budget -> the cheapest plan of which the compiler says that it fits.

In: `Program`, arguments, a request. Out: `Plan` and a compiled step. Law: what is returned was compiled and held
against the budget, or is an error that says what is true.

Reading order: `_verify` (a request answered), `_baseline` (the plain step, where all plans start), `_search`, `_trial`,
`_loop_division`, `_overheads`; `_blame` (pins that stand in the way), `_defects` (forms that cannot be made),
`_plan_cache`, `_plan`, `_frontier`; `_residuals` and `_held_plan` (functions that are differentiated later);
`_arguments`.
"""
