"""Lines that were cut off lose nothing but themselves."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from examples.llama import records
from examples.llama.config import UserError


@pytest.mark.parametrize("end", range(1, 21))
def test_a_line_cut_off_anywhere(tmp_path, end):
    path = tmp_path / "results.jsonl"
    path.write_bytes(b'{"a": 1}\n' + b'{"b": {"c": [1, 2]}}\n'[:end])
    records.append(path, {"d": 3})
    found = records.read(path)
    assert found[0] == {"a": 1}
    assert found[-1] == {"d": 3}
    assert found[1:-1] == ([{"b": {"c": [1, 2]}}] if end >= 20 else [])


def test_writers_do_not_mix(tmp_path):
    path = tmp_path / "results.jsonl"
    results = [{"result": i, "long": [i] * 20_000} for i in range(16)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda result: records.append(path, result), results))
    assert sorted(result["result"] for result in records.read(path)) == list(range(16))


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match=r"no\.jsonl cannot be read"):
        records.read(tmp_path / "no.jsonl")
