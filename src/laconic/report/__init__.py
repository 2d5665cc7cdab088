"""What runs left behind: their records, read again, for tables and pictures."""

from laconic.report.describe import describe, describe_run
from laconic.report.html import page, write_report
from laconic.report.records import RUN_FILES, RunRecord, RunState, find_runs, read_run
from laconic.report.watch import WatchServer

__all__ = [
    "RUN_FILES",
    "RunRecord",
    "RunState",
    "WatchServer",
    "describe",
    "describe_run",
    "find_runs",
    "page",
    "read_run",
    "write_report",
]
