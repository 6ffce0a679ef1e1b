"""The configs: one mixin dataclass per concern, combined into GRPOConfig and RLOOConfig."""
