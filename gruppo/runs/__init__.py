"""What a run leaves on disk, and how to read it. docs/run-folder.md describes the format.

recorder ──► run folder ──► reader   record.py       writes: begin, resume, metrics, events, rollouts
                                     lines.py        files of JSON lines that a full disk only delays
                                     rollouts.py     a completion as a row, rows as a parquet table
                                     files.py        where those tables lie
                                     read.py         reads a folder, live or from a stranger
                                     checkpoints.py  checkpoints as atomic bundles
                                     lock.py         one writer per folder
"""

from gruppo.runs.read import Run
from gruppo.runs.record import RunRecorder
from gruppo.runs.rollouts import RolloutRow, prompt_id

__all__ = ["RolloutRow", "Run", "RunRecorder", "prompt_id"]
