"""docs/comparison.md says what its rows say."""

from pathlib import Path

import pytest

from docs.figures import comparison

PAGE = Path(comparison.DOCS, "comparison.md").read_text("utf-8")


@pytest.mark.parametrize("name", ["main", *comparison.HEAD])
def test_the_tables_are_those_of_the_rows(name):
    lines = comparison.tables()[name]
    assert len(lines) > 4
    assert "\n".join(lines) in PAGE


def test_every_row_is_of_one_text_one_model_and_has_a_loss():
    rows = comparison.read_rows(comparison.ROWS + comparison.MORE)
    assert len(rows) == len({str(sorted(row["run"].items(), key=str)) for row in rows})
    for field in ("text", "model.width", "model.layers", "model.vocab_size", "clip"):
        assert len({row["run"][field] for row in rows}) == 1
    assert all(row["held_out"][-1][:2] == [row["run"]["steps"], row["loss"]] for row in rows)
