"""Diagnose: rules that turn a run directory into findings. Imports no torch; may import record.

reading    -> evidence      files to frozen data, tolerant of torn and missing ones
issues     -> collectives   what each rank called in each group, and the first place where they part
waits                       who waits for whom
crash, hang, mismatch, departures, start, slow      the rules
examine                     all rules, ordered: the verdict
catalogue, render           the long form of every code; a verdict for a person
"""

from model_check.diagnose.catalogue import CATALOGUE, Entry, errors_page, explain
from model_check.diagnose.evidence import Evidence
from model_check.diagnose.examine import Examiner, examine, judge
from model_check.diagnose.reading import load
from model_check.diagnose.render import render

__all__ = [
    "CATALOGUE",
    "Entry",
    "Evidence",
    "Examiner",
    "errors_page",
    "examine",
    "explain",
    "judge",
    "load",
    "render",
]
