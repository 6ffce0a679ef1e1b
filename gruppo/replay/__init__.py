"""Recompute a recorded run without a model: with other rewards, with another recipe, or with two recipes compared.

run folder ──► record.py      generations with their rewards, updates with their log-probs
               settings.py    the run's settings, with changes
               rescore.py     other rewards on the recorded completions; reward_changes.py reports what they change
               compute.py     advantages, loss, d loss / d log-prob: with the functions of training
               compare.py     similarity of two gradients, or of two sets of rewards
               weights.py     gradients with respect to the weights of a model
               run.py         all of it: `replay`
               rows.py, measures.py, tables.py    what is reported
"""

from gruppo.replay.run import Replay, replay

__all__ = ["Replay", "replay"]
