"""Takes over tokens made elsewhere: `python -m examples.llama.tokens --help`.

Flat files of little-endian uint16, as nanoGPT writes them, become a folder for `--data.path`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from examples.llama import check, cli
from examples.llama.config import UserError
from examples.llama.corpus import open_corpus
from examples.llama.prepare import Document, write_tokens
from examples.llama.terminal import run_main
from examples.llama.tokenizer import end_of, open_tokenizer, words_of


def documents(path: Path, split: str, lengths: np.ndarray, end: int) -> Iterator[Document]:
    """The documents of a flat file, each up to and with its `end`.

    Args:
        path: the file.
        split: that it is.
        lengths: bytes of each word of the tokenizer.
        end: the word that ends a document.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    if len(raw) % 2:
        raise UserError(f"{path} is not of uint16: it has {len(raw)} bytes, an odd number")
    tokens = np.frombuffer(raw, "<u2")
    if len(tokens) > 1 and not tokens[1::2].any():
        raise UserError(f"{path} looks like uint32: every second uint16 is 0")
    if not len(tokens) or tokens[-1] != end:
        raise UserError(f"{path} does not end with token {end}, as every document must")
    if tokens.max() >= len(lengths):
        raise UserError(
            f"{path} has token {tokens.max()}, the tokenizer only {len(lengths)} words: "
            "it is of another tokenizer, or not of uint16"
        )
    for document in np.split(tokens, np.flatnonzero(tokens == end)[:-1] + 1):
        yield Document(split, document, int(lengths[document].sum()))


@dataclass(frozen=True)
class TokensConfig:
    """Take over flat files of uint16 tokens."""

    train: Path
    """Tokens to train on; every document ends with <|endoftext|>."""
    held_out: Path
    """Tokens that are held out, in the same form."""
    tokenizer: Path
    """The tokenizer.json that made them, a byte-level one."""
    out: Path = Path("data/tokens")
    """Folder to make, for --data.path of train.py."""


def main(arguments: list[str]) -> None:
    options = cli.read(TokensConfig, arguments, "llama.tokens")
    check.new("out", options.out)
    tokenizer = open_tokenizer(options.tokenizer)
    end = end_of(tokenizer, options.tokenizer)
    words = [tokenizer.id_to_token(i) or "" for i in range(words_of(tokenizer))]
    lengths = np.array([len(word) for word in words])  # byte level: a character is a byte
    lengths[end] = 0

    def both() -> Iterator[Document]:
        yield from documents(options.train, "train", lengths, end)
        yield from documents(options.held_out, "held_out", lengths, end)

    write_tokens(options.out, str(options.train), tokenizer, both())
    print("\n".join(open_corpus(options.out).describe()))


if __name__ == "__main__":
    run_main(main)
