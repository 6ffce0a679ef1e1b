"""What people look at: progress, tables of completions, the model card."""
