"""The configs: one mixin dataclass per concern, joined into GRPOConfig and RLOOConfig."""
