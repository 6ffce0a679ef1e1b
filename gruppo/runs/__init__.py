"""The files that a run writes, and how to read them. docs/run-folder.md describes the format.

recorder ──► run folder ──► reader   record.py        writes: begin, resume, metrics, events, rollouts
                                     record_files.py  the files of the record, also on a full disk
                                     identity.py      run.json: the run's id, and what it continues from
                                     settings.py      config.yaml
                                     secrets.py       settings without their secrets
                                     machine.py       versions of packages, and commits of checkouts
                                     lines.py         files of JSON lines; a full disk only delays them
                                     rollouts.py      a completion as a row, rows as a parquet table
                                     updates.py       per-row values of an update, as a parquet table
                                     tables.py        the files of these tables
                                     links.py         refuses links in the folder
                                     earlier.py       moves old records out of the way without loss
                                     read.py          reads a folder, live or untrusted
                                     follow.py        reads it incrementally, while it grows
                                     checkpoints.py   checkpoints as atomic bundles
                                     manifests.py     manifests of checkpoints, and checks against them
                                     plain.py         checks of checkpoints without a manifest
                                     disk.py          whether an error means a full disk
                                     lock.py          one writer per folder
"""

from gruppo.runs.read import Run
from gruppo.runs.record import RunRecorder
from gruppo.runs.rollouts import RolloutRow, prompt_id
from gruppo.runs.updates import UpdateRows

__all__ = ["RolloutRow", "Run", "RunRecorder", "UpdateRows", "prompt_id"]
