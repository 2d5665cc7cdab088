"""Evaluations: what a run measures, of which model, on which data."""

from laconic.evaluations.kinds import (
    EVALUATIONS,
    Ensemble,
    FineTuned,
    Global,
    Local,
    Probe,
    evaluation_of,
    evaluations,
)
from laconic.evaluations.probe import probe, roc_auc

__all__ = [
    "EVALUATIONS",
    "Ensemble",
    "FineTuned",
    "Global",
    "Local",
    "Probe",
    "evaluation_of",
    "evaluations",
    "probe",
    "roc_auc",
]
