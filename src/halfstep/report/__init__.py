"""One-file HTML reports: self-contained, offline, readable in light and dark."""

from halfstep.report.page import render, write_report

__all__ = ["render", "write_report"]
