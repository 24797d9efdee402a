"""What a person reads: a plan, a comparison of plans. Imports neither torch nor a solver."""

from planner.report.comparison import ComparisonRow, comparison_figures, comparison_report
from planner.report.figures import bindings, plan_figures, summary
from planner.report.plan import plan_html, plan_report, plan_text
from planner.report.verification import Verification, verification_figures, verification_report

__all__ = [
    "ComparisonRow",
    "Verification",
    "bindings",
    "comparison_figures",
    "comparison_report",
    "plan_figures",
    "plan_html",
    "plan_report",
    "plan_text",
    "summary",
    "verification_figures",
    "verification_report",
]
