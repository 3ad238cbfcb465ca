"""Flat files of tokens become the folder that prepare.py makes of their text."""

import json

import numpy as np
import pytest

from examples.llama import tokens
from examples.llama.config import UserError
from examples.llama.corpus import Corpus, open_corpus
from examples.llama.data import sequences
from examples.llama.tokenizer import open_tokenizer, words_of


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


def test_a_tokenizer_with_gaps_has_the_words_up_to_its_last(corpus, tmp_path):
    given = json.loads((corpus.folder / "tokenizer.json").read_text())
    vocab = given["model"]["vocab"]
    last = max(vocab, key=lambda word: vocab[word])
    vocab[last] += 100
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(given))
    assert words_of(open_tokenizer(path)) == vocab[last] + 1


def test_text_without_targets_is_refused_before_training(corpus):
    shards = [shard | {"documents": shard["tokens"]} for shard in corpus.splits["held_out"]]
    empty = Corpus(corpus.folder, corpus.manifest | {"held_out": shards})
    with pytest.raises(UserError, match="all documents of its held-out text are empty"):
        sequences(empty, "held_out", 16, "concat")
