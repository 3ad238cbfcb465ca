"""Text of every kind that is found on disks: read as it is, or refused by name."""

import gzip
import json
import os
import tracemalloc

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from examples.llama import sources, tokens
from examples.llama.config import DataConfig, UserError
from examples.llama.prepare import prepare


def read(path) -> list[str]:
    return [text for _, text in sources.read_documents(str(path), "text")]


def test_hidden_files_and_binaries_of_a_folder_are_left_out_and_counted(tmp_path, capsys):
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "index").write_bytes(b"DIRC\0\0")
    (tmp_path / ".DS_Store").write_bytes(b"\0\0\0\1Bud1")
    (tmp_path / "program").write_bytes(b"\x7fELF\0")
    (tmp_path / "LICENSE").write_text("do what you like")
    (tmp_path / "a.txt").write_text("a few words")
    sources.check(str(tmp_path))
    assert "2 files of text; left out, as hidden or not text: 3" in capsys.readouterr().out
    assert read(tmp_path) == ["do what you like", "a few words"]


def test_text_is_read_in_pieces_that_add_up(tmp_path):
    lines = "".join(f"{i} " * (i % 900) + "\n" for i in range(400))
    (tmp_path / "a.txt").write_text(lines)
    with gzip.open(tmp_path / "b.txt.gz", "wt") as file:
        file.write(lines)
    (tmp_path / "word.txt").write_text("x" * 1_000_000)  # a word of a megabyte
    for name in ("a.txt", "b.txt.gz"):
        pieces = read(tmp_path / name)
        assert "".join(pieces) == lines
        assert all(piece.endswith("\n") and len(piece) > sources.PIECE for piece in pieces[:-1])
    words = read(tmp_path / "word.txt")
    assert max(map(len, words)) == sources.LONGEST
    assert sum(map(len, words)) == 1_000_000


def test_a_text_file_is_never_held_as_a_whole(tmp_path):
    """So what a piece takes does not depend on the size of the file, and a pass is linear."""
    path = tmp_path / "a.txt"
    path.write_text("a line of some forty characters it is\n" * 200_000)
    tracemalloc.start()
    try:
        size = sum(len(text) for _, text in sources.read_documents(str(path), "text"))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert size == path.stat().st_size
    assert peak < size / 10


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.jsonl.gz",
            gzip.compress(b'{"text": "abc"}\n' * 99, mtime=0)[:-20],
            "is not JSON lines, near",
        ),
        (
            "b.jsonl.gz",
            gzip.compress(bytes(99), mtime=0)[:12] + b"\xff" * 90,
            "is not JSON lines, near",
        ),
        ("c.txt.gz", gzip.compress(b"a few words" * 99, mtime=0)[:-20], "cannot be read"),
        ("d.jsonl", b"[" * 200_000, "is not JSON lines, near line 1"),
        ("e.jsonl", b'{"text": "\\ud800"}', "record 1 is not text: half a character"),
        ("f.txt", b"caf\xe9", "is not text: no UTF-8 at byte 3"),
        ("g.parquet", b"PAR1 and no more", "is not parquet"),
    ],
)
def test_what_is_damaged_is_refused_by_name(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as refused:
        read(tmp_path / name)
    assert name in str(refused.value)
    assert "\n" not in str(refused.value)


def test_corrupt_pages_of_parquet_are_refused(tmp_path):
    path = tmp_path / "a.parquet"
    records = [{"text": f"the {i}th document"} for i in range(3_000)]
    pq.write_table(pa.Table.from_pylist(records), path, compression="gzip")
    content = bytearray(path.read_bytes())
    content[40:4_000] = b"\xff" * 3_960
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"a\.parquet is not parquet"):
        read(path)


def test_blank_lines_between_records_are_nothing(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n\n  \n{"text": "two"}\n')
    assert read(tmp_path / "a.jsonl") == ["one", "two"]


def test_text_that_changed_under_the_same_size_and_time_is_prepared_anew(text_file, tmp_path):
    path = tmp_path / "a.txt"
    text = text_file.read_text()
    path.write_text(text)
    config = DataConfig(path=str(path), cache=tmp_path / "cache")
    first, stat = prepare(config, 300), path.stat()
    path.write_text(text.swapcase())
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert prepare(config, 300).identity != first.identity


def test_a_changed_end_of_the_manifest_is_refused(corpus, tmp_path):
    manifest = json.loads((corpus.folder / "manifest.json").read_text())
    for name in corpus.folder.iterdir():
        (tmp_path / name.name).write_bytes(name.read_bytes())
    (tmp_path / "manifest.json").write_text(json.dumps(manifest | {"end": 5}))
    with pytest.raises(UserError, match=r"manifest\.json is not what was written"):
        prepare(DataConfig(path=str(tmp_path)), 300)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x.astype("<u4").tobytes(), "looks like uint32: every second uint16 is 0"),
        (lambda x: x.tobytes() + b"\0", "an odd number"),
    ],
)
def test_files_that_are_not_of_uint16_are_refused(corpus, tmp_path, change, message):
    whole = np.concatenate(corpus.shards("train")).astype("<u2")
    (tmp_path / "a.bin").write_bytes(change(whole))
    arguments = ["--train", tmp_path / "a.bin", "--held-out", tmp_path / "a.bin"]
    arguments += ["--tokenizer", corpus.folder / "tokenizer.json", "--out", tmp_path / "out"]
    with pytest.raises(UserError, match=message):
        tokens.main([str(argument) for argument in arguments])
    assert not (tmp_path / "out").exists()
