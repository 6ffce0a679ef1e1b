"""A recorded run, computed again without a model: other rewards, another recipe, two recipes beside each other.

run folder ──► record.py      generations with their rewards, updates with their log-probs
               settings.py    the run's settings, with changes
               rescore.py     other rewards on the recorded completions; reward_changes.py says what they change
               compute.py     advantages, loss, d loss / d log-prob: the functions of training
               compare.py     how alike two gradients, or two sets of rewards, are
               weights.py     gradients of weights, with a model
               run.py         all of it: `replay`
               rows.py, measures.py, tables.py    what is reported
"""

from gruppo.replay.run import Replay, replay

__all__ = ["Replay", "replay"]
