"""Several processes: who is there, who runs what, where the weights are, and how they end together."""
