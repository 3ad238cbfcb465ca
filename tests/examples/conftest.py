"""A small text, prepared once, and the settings of runs that take seconds."""

import dataclasses
import random
from pathlib import Path

import pytest

from examples.llama.config import Config, DataConfig, MeshConfig, ModelConfig
from examples.llama.corpus import Corpus
from examples.llama.prepare import prepare

SENTENCE = "the row of a matrix turns while its norm stays and every step has one length"
WORDS = SENTENCE.split(" ")


def text(words: int, seed: int) -> str:
    """Words whose successors are not all alike, so that there is something to learn."""
    rng = random.Random(seed)
    at, out = 0, []
    for _ in range(words):
        at = (at + rng.choice((1, 1, 1, 4))) % len(WORDS)
        out.append(WORDS[at])
    return " ".join(out)


@pytest.fixture(scope="session")
def text_file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text("\n".join(text(200, seed) for seed in range(40)), "utf-8")
    return path


@pytest.fixture(scope="session")
def corpus(text_file, tmp_path_factory) -> Corpus:
    cache = tmp_path_factory.mktemp("cache")
    return prepare(DataConfig(path=str(text_file), cache=cache, held_out=0.2), 300)


@pytest.fixture
def small(corpus, tmp_path) -> Config:
    """Settings of a run on one device that takes seconds."""
    return Config(
        name="run",
        out=tmp_path,
        model=ModelConfig(
            vocab_size=304, context=16, layers=2, width=32, heads=4, kv_heads=2, mlp_width=48
        ),
        data=DataConfig(path=str(corpus.folder)),
        mesh=MeshConfig(data=1, fsdp=1, tensor=1),
        precision="float32",
        steps=8,
        batch=8,
        warmup=2,
        log_every=1,
        eval_every=4,
        save_every=4,
    )


@pytest.fixture
def replaced():
    """Settings with some fields replaced: `replaced(config, batch=4, model={"layers": 1})`."""

    def replace(config, **changes):
        for name, value in changes.items():
            if isinstance(value, dict):
                changes[name] = dataclasses.replace(getattr(config, name), **value)
        return dataclasses.replace(config, **changes)

    return replace
