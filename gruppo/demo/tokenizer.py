"""The demo's tokenizer: whole words of the task, digits one by one, single characters for anything else."""

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["build_tokenizer", "split_pieces"]

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
# A word takes the space before it and a punctuation mark the space after it: short sequences, exact round trip.
PIECES = r"\d| ?[A-Za-z]+|[.,:?] ?|[\s\S]"
CHARACTERS = ["\n", *(chr(code) for code in range(32, 127))]


def split_pieces(text: str) -> list[str]:
    """Cut a text into the tokenizer's pieces, e.g. "has 12 pens." → ["has", " ", "1", "2", " pens", "."]."""
    return re.findall(PIECES, text)


def build_tokenizer(texts: Iterable[str]) -> "PreTrainedTokenizerFast":
    """Make a tokenizer whose vocabulary is every piece of `texts` plus the printable ASCII characters."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = {piece for text in texts for piece in split_pieces(text)} - set(CHARACTERS)
    vocab = {token: index for index, token in enumerate([PAD, EOS, UNK, *CHARACTERS, *sorted(pieces)])}
    # Longest match without a continuation prefix: a known word is one token, an unknown word is split into letters.
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token=UNK, continuing_subword_prefix=""))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(PIECES), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=256,
    )
