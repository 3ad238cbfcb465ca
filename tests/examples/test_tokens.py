"""Flat files of tokens become the folder that prepare.py makes of their text."""

import numpy as np
import pytest

from examples.llama import tokens
from examples.llama.config import UserError
from examples.llama.corpus import open_corpus


@pytest.fixture
def convert(corpus, tmp_path):
    """Writes both splits, changed by `change`, to flat files and takes them over."""

    def run(change=lambda x: x):
        out = tmp_path / "out"
        arguments = ["--out", out, "--tokenizer", corpus.folder / "tokenizer.json"]
        for split in ("train", "held_out"):
            path = tmp_path / f"{split}.bin"
            change(np.concatenate(corpus.shards(split)).astype("<u2")).tofile(path)
            arguments += [f"--{split.replace('_', '-')}", path]
        tokens.main([str(argument) for argument in arguments])
        return open_corpus(out)

    return run


def test_the_same_corpus(convert, corpus):
    taken = convert()
    assert taken.splits == corpus.splits  # files, counts, bytes of text, checksums
    assert taken.identity == corpus.identity
    with pytest.raises(UserError, match="choose another --out"):
        convert()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x[:-1], "does not end with token 0"),
        (lambda x: x[:0], "does not end with token 0"),
        (lambda x: x + (x == x[0]) * np.uint16(999), "the tokenizer only 3"),
    ],
)
def test_what_is_refused_leaves_nothing(convert, tmp_path, change, message):
    with pytest.raises(UserError, match=message):
        convert(change)
    assert not list(tmp_path.glob("out*"))
