"""Program, budget -> the cheapest plan of which the compiler says that it fits.

In: `Program`, arguments, a request. Out: `Plan` and a compiled step. Law: what is returned was compiled and held
against the budget, or is an error that says what is true.

Reading order: `_request`, `_problem` (a step and its arguments, nothing compiled), `_baseline` (the same compiled,
where all plans start) and `_graphs` of its forms; `_verify` (a request answered), `_planned` (a plan followed),
`_correction` (one that needs more here), `_compiled_schedule`, `_search` with `_cuttings`, `_solving`, `_trial`,
`_effort`, `_forms` and `_loop_division`; `_prediction` (nothing compiled); `_refusal` (what to say where nothing fits),
`_state_on_host` (what to do then), `_blame` (pins that stand in the way), `_defects` (forms that cannot be made);
`_made_for` and `_made_for_call`,
`_plan`, `_copies`, `_plan_cache`, `_known_plans`, `_agreement` (one plan in several processes), `_frontier`;
`_residuals` and `_held_plan` (functions that are differentiated later); `_arguments`.
"""
