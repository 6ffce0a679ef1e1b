"""Several processes: detecting lost ones, balancing work, sharded weights, collectives, and stopping together."""
