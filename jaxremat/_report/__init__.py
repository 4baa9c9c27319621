"""Outcome of planning -> pictures and tables: text in a terminal, HTML in a notebook, one self-contained page."""

from ._report import Report as Report
