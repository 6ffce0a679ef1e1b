"""What a run leaves on disk, and how to read it. docs/run-folder.md describes the format.

recorder ──► run folder ──► reader   record.py        writes: begin, resume, metrics, events, rollouts
                                     record_files.py  the files of that record, when the disk is full too
                                     identity.py      run.json: which run this is, and what it went on from
                                     settings.py      config.yaml
                                     secrets.py       settings without their secrets
                                     machine.py       versions of packages, and commits of checkouts
                                     lines.py         files of JSON lines that a full disk only delays
                                     rollouts.py      a completion as a row, rows as a parquet table
                                     updates.py       what an update computed about its rows, as such a table
                                     tables.py        where those tables lie
                                     earlier.py       what was in the way and must not be lost
                                     read.py          reads a folder, live or from a stranger
                                     follow.py        reads it piece by piece, while it grows
                                     checkpoints.py   checkpoints as atomic bundles
                                     manifests.py     what a checkpoint should hold, and whether it does
                                     plain.py         the same of one that has no manifest
                                     disk.py          whether an error means a full disk
                                     lock.py          one writer per folder
"""

from gruppo.runs.read import Run
from gruppo.runs.record import RunRecorder
from gruppo.runs.rollouts import RolloutRow, prompt_id
from gruppo.runs.updates import UpdateRows

__all__ = ["RolloutRow", "Run", "RunRecorder", "UpdateRows", "prompt_id"]
