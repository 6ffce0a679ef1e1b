"""What is checked and made before a run begins."""
