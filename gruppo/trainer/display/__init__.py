"""Output for people: progress, tables of completions, the model card."""
