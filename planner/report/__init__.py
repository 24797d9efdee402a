"""What a person reads: a plan, a comparison of plans. Imports neither torch nor a solver."""

from planner.report.comparison import ComparisonRow, comparison_figures, comparison_report
from planner.report.figures import bindings, plan_figures, summary
from planner.report.plan import plan_html, plan_report, plan_text
from planner.report.proof import Proof, proof_figures, proof_report, record_report
from planner.report.sizing import Sizing, sizing_figures, sizing_report
from planner.report.verification import Verification, verification_figures, verification_report

__all__ = [
    "ComparisonRow",
    "Proof",
    "Sizing",
    "Verification",
    "bindings",
    "comparison_figures",
    "comparison_report",
    "plan_figures",
    "plan_html",
    "plan_report",
    "plan_text",
    "proof_figures",
    "proof_report",
    "record_report",
    "sizing_figures",
    "sizing_report",
    "summary",
    "verification_figures",
    "verification_report",
]
