"""Outcome of planning -> charts and tables: text in a terminal, HTML in a notebook, one self-contained page.

In: `Outcome`, plain data. Out: text and HTML. Invariant: imports no JAX; both show the same rows and sentences.

Reading order: `_outcome` with its parts `_actions`, `_account`, `_loop_forms` and `_name_policy`; `_report`,
`_content`, `_text` (with rich), `_html`; `_frontier_plot`.
"""

from ._report import Report as Report
