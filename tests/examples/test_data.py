"""Text becomes tokens, and every token is learned from once an epoch."""

import gzip
import itertools
import json
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from examples.llama import data, documentation, sources
from examples.llama.config import DataConfig, UserError
from examples.llama.corpus import open_corpus
from examples.llama.prepare import main as prepare_main
from examples.llama.prepare import prepare

END = 0


def document(length: int, start: int) -> list[int]:
    return [*range(start, start + length), END]


SHARDS = [
    np.array(document(5, 10) + document(2, 20) + document(9, 30), np.uint16),
    np.array(document(4, 50), np.uint16),
]


def learned(sequences: np.ndarray) -> list[tuple[int, int]]:
    """Inputs and targets that count."""
    counts = data.weights(sequences, END)
    return sorted(
        zip(sequences[:, :-1][counts].tolist(), sequences[:, 1:][counts].tolist(), strict=True)
    )


def pairs() -> list[tuple[int, int]]:
    """Every token of a document with the one after it, its end included: no more and no less."""
    found = []
    for shard in SHARDS:
        found += [(a, b) for a, b in itertools.pairwise(shard.tolist()) if a != END]
    return sorted(found)


@pytest.mark.parametrize("context", [1, 3, 4, 7, 30])
def test_packing_loses_nothing_and_learns_nothing_across_documents(context):
    source = data.Contexts(SHARDS, context, END)
    sequences = np.stack([source[i] for i in range(len(source))])
    assert sequences.shape[1] == context + 1
    assert learned(sequences) == pairs()


def test_padded_documents_are_cut_to_the_context_and_padding_does_not_count():
    source = data.Documents(SHARDS, 6, END)
    sequences = np.stack([source[i] for i in range(len(source))])
    expected = [
        [10, 11, 12, 13, 14, END, END],
        [20, 21, END, END, END, END, END],
        [30, 31, 32, 33, 34, 35, 36],
        [50, 51, 52, 53, END, END, END],
    ]
    np.testing.assert_array_equal(sequences, expected)
    np.testing.assert_array_equal(data.weights(sequences, END).sum(axis=1), [5, 2, 6, 4])


def sequences_of(iterator, batches: int) -> list[tuple[int, ...]]:
    return [tuple(sequence) for _ in range(batches) for sequence in next(iterator)]


def test_every_epoch_has_every_row_once_in_a_new_order():
    source = data.Contexts([np.arange(1, 61, dtype=np.uint16)], 5, END)  # 12 sequences
    sequences = sequences_of(data.train_batches(source, 4, seed=3), 6)
    first, second = sequences[:12], sequences[12:]
    every = sorted(tuple(source[i]) for i in range(12))
    assert sorted(first) == sorted(second) == every
    assert first != second
    assert sequences == sequences_of(data.train_batches(source, 4, seed=3), 6)
    assert sequences != sequences_of(data.train_batches(source, 4, seed=4), 6)


def test_processes_share_each_batch():
    source = data.Contexts([np.arange(1, 61, dtype=np.uint16)], 5, END)
    whole = data.train_batches(source, 4, 0)
    parts = [data.train_batches(source, 4, 0, (i, 2)) for i in range(2)]
    for _ in range(5):
        shared = [sequence for part in parts for sequence in sequences_of(part, 1)]
        assert sorted(shared) == sorted(sequences_of(whole, 1))


def test_the_place_in_the_data_can_be_kept():
    source = data.Contexts([np.arange(1, 61, dtype=np.uint16)], 5, END)
    one = data.train_batches(source, 4, 0)
    sequences_of(one, 4)
    place = json.loads(json.dumps(one.get_state()))
    expected = sequences_of(one, 5)
    other = data.train_batches(source, 4, 0)
    other.set_state(place)
    assert sequences_of(other, 5) == expected


@pytest.mark.parametrize("processes", [1, 2])
def test_evaluation_sees_each_row_once(processes):
    source = data.Contexts([np.arange(1, 61, dtype=np.uint16)], 5, END)
    parts = [list(data.eval_batches(source, 4, 9, (i, processes))) for i in range(processes)]
    assert {batch.shape for part in parts for batch in part} == {(4 // processes, 6)}
    assert len({len(part) for part in parts}) == 1  # no process waits for another
    sequences = np.concatenate([batch for part in parts for batch in part])
    counted = sequences[data.weights(sequences, END).any(axis=1)]
    assert sorted(map(tuple, counted)) == sorted(tuple(source[i]) for i in range(9))


def test_text_comes_back_from_its_tokens(corpus, text_file):
    tokenizer = corpus.tokenizer()
    tokens = np.concatenate([*corpus.shards("train"), *corpus.shards("held_out")])
    documents = np.split(tokens, np.flatnonzero(tokens == corpus.end) + 1)
    texts = [tokenizer.decode(document[:-1].tolist()) for document in documents if len(document)]
    assert sorted("".join(texts)) == sorted(text_file.read_text("utf-8"))
    assert all(text in text_file.read_text("utf-8") for text in texts)
    sizes = [s["bytes"] for shards in corpus.splits.values() for s in shards]
    assert sum(sizes) == text_file.stat().st_size
    assert min(sizes) > 0


def test_text_is_prepared_once_and_anew_when_it_changes(text_file, tmp_path):
    path = tmp_path / "copy.txt"
    config = DataConfig(path=str(path), cache=tmp_path / "cache")
    shutil.copy(text_file, path)
    first, again = prepare(config, 300), prepare(config, 300)
    assert first.folder == again.folder
    path.write_text(text_file.read_text("utf-8") + "more", "utf-8")
    assert prepare(config, 300).folder != first.folder
    assert prepare(config, 301).folder != first.folder


def test_a_given_tokenizer_is_used(corpus, text_file, tmp_path):
    given = corpus.folder / "tokenizer.json"
    config = DataConfig(path=str(text_file), cache=tmp_path, tokenizer=given)
    assert (prepare(config, 9_999).folder / "tokenizer.json").read_text() == given.read_text()


def test_a_folder_is_read_whole(text_file, tmp_path):
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    shutil.copy(text_file, folder / "a.txt")
    (folder / "deep" / "b.md").write_text("the second file", "utf-8")
    (folder / "picture.png").write_bytes(b"\x89PNG")
    made = prepare(DataConfig(path=str(folder), cache=tmp_path / "cache"), 300)
    sizes = [s["bytes"] for shards in made.splits.values() for s in shards]
    assert sum(sizes) == text_file.stat().st_size + len("the second file")


def damage(corpus, tmp_path, change):
    folder = tmp_path / "prepared"
    shutil.copytree(corpus.folder, folder)
    change(folder)
    return DataConfig(path=str(folder), cache=tmp_path / "cache")


def test_a_corrupt_shard_is_refused(corpus, tmp_path):
    def change(folder):
        path = folder / "train-00000.npy"
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)

    with pytest.raises(UserError, match=r"train-00000.npy is not the file of its manifest"):
        prepare(damage(corpus, tmp_path, change), 300)


def test_a_missing_shard_is_refused(corpus, tmp_path):
    config = damage(corpus, tmp_path, lambda f: (f / "held_out-00000.npy").unlink())
    with pytest.raises(UserError, match=r"held_out-00000.npy is missing"):
        prepare(config, 300)


def test_a_foreign_tokenizer_is_refused(corpus, tmp_path):
    config = damage(corpus, tmp_path, lambda f: (f / "tokenizer.json").write_text("{}"))
    with pytest.raises(UserError, match=r"tokenizer.json is not the file of its manifest"):
        prepare(config, 300)


def test_a_broken_manifest_is_refused(corpus, tmp_path):
    config = damage(corpus, tmp_path, lambda f: (f / "manifest.json").write_text("{"))
    with pytest.raises(UserError, match=r"manifest.json is not JSON"):
        prepare(config, 300)


def test_a_failed_preparation_leaves_nothing(text_file, tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    shutil.copy(text_file, folder / "a.txt")
    (folder / "b.txt").write_bytes(b"caf\xe9")
    with pytest.raises(UserError, match=r"b.txt is not text: no UTF-8 at byte 3"):
        prepare(DataConfig(path=str(folder), cache=tmp_path / "cache"), 300)
    assert not list((tmp_path / "cache").glob("*"))


@pytest.mark.slow
def test_the_documentation_of_python_is_prose_from_many_modules():
    documents = documentation.python_documentation(("flax", "optax"))  # the others are long
    assert {"python.json.decoder", "topics.lambda"} <= documents.keys()
    assert sum(map(len, documents.values())) > 2e6
    paragraphs = [p for text in documents.values() for p in text.split("\n\n")]
    assert len(paragraphs) == len(set(paragraphs))
    assert not any(">>>" in p for p in paragraphs)


def test_documents_are_held_out_by_their_names(text_file, tmp_path):
    """The same documents, whatever the tokenizer; more of them when more are asked for."""

    def held_out(fraction: float, vocab_size: int) -> set[str]:
        config = DataConfig(path=str(text_file), cache=tmp_path, held_out=fraction)
        made = prepare(config, vocab_size)
        tokens = np.concatenate(made.shards("held_out"))
        documents = np.split(tokens, np.flatnonzero(tokens == made.end) + 1)
        return {made.tokenizer().decode(d[:-1].tolist()) for d in documents if len(d)}

    few, same, more = held_out(0.1, 300), held_out(0.1, 290), held_out(0.5, 300)
    assert few == same
    assert few < more


RECORDS = [{"text": f"the {i}th document says this", "url": f"http://{i}"} for i in range(30)]


def read(path, field="text") -> list[str]:
    return [text for _, text in sources.read_documents(str(path), field)]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json.gz"])
def test_json_lines(tmp_path, name):
    lines = "\n".join(map(json.dumps, RECORDS)).encode()
    (tmp_path / name).write_bytes(gzip.compress(lines) if name.endswith("gz") else lines)
    assert read(tmp_path) == [record["text"] for record in RECORDS]
    assert read(tmp_path / name, "url") == [record["url"] for record in RECORDS]
    with pytest.raises(UserError, match=f"{name}: record 1 has no text in a field 'body'"):
        read(tmp_path / name, "body")


@pytest.mark.parametrize(
    ("content", "name"), [(b'{"text": "a"}\n{"text": "b', "a.jsonl"), (b"\x1f\x8b", "a.jsonl.gz")]
)
def test_broken_json_lines(tmp_path, content, name):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=f"{name} is not JSON lines, near line"):
        read(tmp_path)


def test_parquet(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist(RECORDS), path)
    assert read(tmp_path) == [record["text"] for record in RECORDS]
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(UserError, match=r"a.parquet is not parquet"):
        read(path)


def test_a_data_set_of_the_hub(tmp_path, monkeypatch):
    """In the format of allenai/c4: configurations of gzipped JSON lines, named in its README."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    folder = tmp_path / "c4"
    (folder / "en").mkdir(parents=True)
    for i in range(3):
        lines = "\n".join(map(json.dumps, RECORDS[10 * i : 10 * i + 10])).encode()
        (folder / "en" / f"c4-train.0000{i}-of-00003.json.gz").write_bytes(gzip.compress(lines))
    header = {"configs": [{"config_name": "en", "data_files": "en/c4-train.*.json.gz"}]}
    (folder / "README.md").write_text(f"---\n{json.dumps(header)}\n---\n")
    assert read(f"hf:{folder}:en") == [record["text"] for record in RECORDS]


def test_the_command_makes_a_folder_that_can_be_trained_on(text_file, tmp_path, capsys):
    arguments = ["--path", str(text_file), "--vocab-size", "300", "--held-out", "0.2"]
    prepare_main([*arguments, "--out", str(tmp_path / "made")])
    made = open_corpus(tmp_path / "made")
    assert capsys.readouterr().out.splitlines()[-2:] == list(made.describe())
    assert made.vocab_size == 300
    with pytest.raises(UserError, match="made exists"):
        prepare_main([*arguments, "--out", str(tmp_path / "made")])
