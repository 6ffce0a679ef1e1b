"""Re-exports of helpers under the names and module path from which existing scripts import them."""

from gruppo.algo.logprobs import entropy_from_logits, selective_log_softmax
from gruppo.algo.stats import nanmax, nanmin, nanstd
from gruppo.data.collate import pad, shuffle_sequence_dict, split_tensor_dict
from gruppo.data.sampler import RepeatSampler
from gruppo.policy.adapters import use_adapter
from gruppo.policy.loading import disable_dropout_in_model
from gruppo.trainer.display.completions import print_prompt_completions_sample

__all__ = [
    "RepeatSampler",
    "disable_dropout_in_model",
    "entropy_from_logits",
    "nanmax",
    "nanmin",
    "nanstd",
    "pad",
    "print_prompt_completions_sample",
    "selective_log_softmax",
    "shuffle_sequence_dict",
    "split_tensor_dict",
    "use_adapter",
]
