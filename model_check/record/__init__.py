"""Record: the contract on disk between the processes that write and those that read. Imports no torch.

Writers append; readers tolerate the torn last record of a killed rank and say so.
"""

from model_check.record.files import JsonlReading, JsonlWriter, read_json, read_jsonl, write_json_atomic
from model_check.record.paths import RunDir, new_run_id
from model_check.record.verdict import Finding, Verdict

__all__ = [
    "Finding",
    "JsonlReading",
    "JsonlWriter",
    "RunDir",
    "Verdict",
    "new_run_id",
    "read_json",
    "read_jsonl",
    "write_json_atomic",
]
