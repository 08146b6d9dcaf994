"""The HTML page of a run or a comparison."""

from wardround.report.page import render, write_report

__all__ = ["render", "write_report"]
