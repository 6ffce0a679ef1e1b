"""The first half of a training step: rewards, tools, replaced groups, generations sampled ahead of time."""
