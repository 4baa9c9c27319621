"""Outcome of planning -> pictures and tables: text in a terminal, HTML in a notebook, one self-contained page.

In: `Outcome`, plain data. Out: text and HTML. Law: imports no JAX; every form shows the same rows and sentences.

Reading order: `_outcome` with its parts `_actions`, `_account`, `_loop_forms` and `_name_policy`; `_report`,
`_content`, `_text` (with rich), `_html`; `_frontier_plot`.
"""

from ._report import Report as Report
