"""What runs left behind: their records, read again, for tables and pictures."""

from laconic.report.records import RunRecord, find_runs, read_run

__all__ = ["RunRecord", "find_runs", "read_run"]
