"""What a checkpoint remembers beside weights, and an orderly end."""
