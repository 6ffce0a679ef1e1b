"""What a checkpoint remembers beside weights."""
