"""The first half of a training step: rewards, tools, replacements, generations that are sampled ahead."""
