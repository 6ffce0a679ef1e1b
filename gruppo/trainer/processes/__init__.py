"""Several processes: who is there, who runs what, and where the weights are."""
