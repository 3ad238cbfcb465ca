"""Tokenizers of bytes: read, trained, measured."""

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from examples.llama.config import UserError
from examples.llama.terminal import line

END = "<|endoftext|>"
LEAST = 257  # words: one a byte, and `END`


def open_tokenizer(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise UserError(f"tokenizer {path} cannot be read: {line(error)}") from None


def words_of(tokenizer: Tokenizer) -> int:
    """One more than its last word, of which some before it may be missing."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE; its word 0 ends a document."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def end_of(tokenizer: Tokenizer, path: Path | None) -> int:
    """The word that ends a document."""
    if (end := tokenizer.token_to_id(END)) is None:
        raise UserError(f"{path} has no word {END} to end a document with")
    return end
