"""The benchmarks at their smallest: what they count and write, not how fast anything is."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest
from tolerance import NEWTON_SCHULZ, tolerance

from benchmarks import collectives, measure, paper_table, passes, plot, step, tpu
from benchmarks.sets import SETS, matrices, row_axes

DOCS = Path(__file__).parents[2] / "docs"


def test_step_reports_every_case_against_the_limit_and_adamw(tmp_path, capsys):
    path = tmp_path / "new" / "results.json"
    args = step.Args(
        ("tiny",), layouts=("stacked",), rows=("first",), seconds=0, repeats=1, out=path
    )
    rows = step.main(args)
    written = json.loads(path.read_text())
    assert written["steps"] == rows
    assert written["machine"]["jax"] == jax.__version__
    assert [row["optimizer"] for row in rows] == ["adamw", "nora"]
    weights = 2 * (4 * 64 * 64 + 3 * 64 * 172)
    for row in rows:
        assert row["weights"] == weights
        seconds_at_limit = 20 * weights / written["copy_bytes_a_second"]
        assert row["of_limit"] == pytest.approx(1e-3 * row["milliseconds"] / seconds_at_limit)
    assert rows[0]["of_adamw"] == 1
    assert rows[1]["of_adamw"] == rows[1]["milliseconds"] / rows[0]["milliseconds"]
    assert "one step, float32" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "args"),
    [
        (step, step.Args(repeats=0)),
        (step, step.Args(block_rows=(0,))),
        (paper_table, paper_table.Args(repeats=-1)),
        (collectives, collectives.Args(devices=())),
        (tpu, tpu.Args(layers=0)),
        (passes, passes.Args(block_rows=(0,))),
    ],
)
def test_counts_of_nothing_are_refused_before_anything_runs(command, args, capsys):
    with pytest.raises(SystemExit, match=r"error: .* is .*: give at least 1"):
        command.main(args)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("rows", ["first", "last"])
@pytest.mark.parametrize("layout", ["stacked", "leaves"])
def test_sets_have_the_same_weights_and_rows_in_every_layout(layout, rows):
    reduction, output = row_axes(layout, rows)
    shapes = matrices(SETS["tiny"], layout, rows)
    assert sum(jnp.zeros(s).size for s in shapes.values()) == 2 * (4 * 64 * 64 + 3 * 64 * 172)
    gate = next(shape for name, shape in shapes.items() if name.startswith("gate"))
    assert gate[reduction] == 64
    assert gate[output] == 172


def test_time_steps_gives_the_times_of_a_step_and_of_compiling_it():
    def step(x, y):
        return jnp.tanh(x @ y)

    timing = measure.time_steps(step, jnp.ones((64, 64)), jnp.ones((64, 64)), seconds=0, repeats=3)
    assert timing.seconds > 0
    assert timing.compile_seconds > 0


def test_a_case_out_of_memory_is_a_row_that_says_so(capsys):
    def run(case):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 1 TB\nmore")

    rows = measure.rows_with_progress("t", [paper_table.Case((2, 3))], run)
    assert rows == [{"shape": (2, 3), "error": "RESOURCE_EXHAUSTED: 1 TB"}]
    measure.show("t", {"milliseconds": "ms|.3f"}, rows)
    assert "RESOURCE_EXHAUSTED" in capsys.readouterr().out


def test_paper_table_holds_both_ways_beside_the_papers_numbers():
    rows = paper_table.main(paper_table.Args(largest=512 * 512, seconds=0, repeats=1))
    assert [row["shape"] for row in rows] == ["512 × 512"]
    assert rows[0]["ratio"] == rows[0]["newton_schulz_ms"] / rows[0]["row_ms"]
    assert rows[0]["paper_ratio"] == pytest.approx(9.52, abs=0.01)  # as printed in the paper


def test_both_ways_of_the_paper_table_do_what_they_say():
    h, w = jax.random.normal(jax.random.key(0), (2, 24, 40))
    d = paper_table.project_normalize(h, w)
    assert jnp.allclose(jnp.linalg.norm(d, axis=1), 1, rtol=0, atol=tolerance(40))
    cosines = jnp.sum(d * w, axis=1) / jnp.linalg.norm(w, axis=1)
    assert jnp.allclose(cosines, 0, rtol=0, atol=tolerance(40))
    muon = optax.contrib.scale_by_muon(beta=0.0, nesterov=False)
    rounding = tolerance(40, condition=NEWTON_SCHULZ)
    for g in (h, h.T):
        theirs, _ = muon.update(g, muon.init(g))
        assert jnp.allclose(paper_table.newton_schulz(g, w), theirs, rtol=0, atol=rounding)


def test_collectives_are_counted_by_kind_and_size():
    hlo = """
      %a = (f32[2,3]{1,0}, bf16[4]{0}) all-reduce(%x, %y), replica_groups={{0,1}}
      %b = f32[8]{0} all-gather-start(%z), dimensions={0}
      %c = f32[8]{0} all-gather-done(%b)
      %d = f32[8]{0} add(%b, %b)
      %e = pred[5]{0} collective-permute(%p)
    """
    assert collectives.collective_bytes(hlo) == {
        "all-reduce": 2 * 3 * 4 + 4 * 2,
        "all-gather": 32,
        "collective-permute": 5,
    }


def test_nora_sends_sums_of_rows_and_muon_sends_matrices():
    rows = collectives.main(collectives.Args(set="tiny", devices=(4,), block_rows=(1, 8)))
    blocks = {row["split"]: row["bytes_a_row"] for row in rows if row["block_rows"] == 8}
    rows = [row for row in rows if row["block_rows"] != 8]
    sent = {(row["split"], row["optimizer"]): row["bytes_a_row"] for row in rows}
    # 64 and 172 rows over 4 devices: whole blocks of 8 in the first alone.
    # Of a row: its 8 numbers of a Gram matrix, its greatest, and twice two sums of squares.
    assert blocks["reduction"] <= 4 * (8 + 5)
    assert blocks["reduction"] > 4 * 8
    assert sent["output", "adamw"] == sent["reduction", "adamw"] == sent["output", "nora"] == 0
    assert sent["reduction", "nora"] == 20  # two sums of float32, then three
    assert min(sent["output", "muon"], sent["reduction", "muon"]) > 4 * 64  # whole rows


def test_plot_draws_the_same_file_from_the_same_results(tmp_path):
    results = DOCS / "results" / "step-h100.json"
    pictures = [tmp_path / "one.svg", tmp_path / "two.svg"]
    for picture in pictures:
        plot.main(plot.Args(results, picture))
    first, second = (picture.read_text() for picture in pictures)
    assert first == second
    assert "what the memory allows" in first


def test_what_was_scheduled_for_kernels_is_counted_by_shape(tmp_path):
    kernel = '%a = (f32[4,256,384]{2,1,0}) custom-call(), custom_call_target="tpu_custom_call"'
    copy = "%b = (f32[4,256,384]{2,1,0}) copy(%a)"
    for name, bundles, program in [("a", 20, kernel), ("b", 100, kernel), ("c", 170, copy)]:
        (tmp_path / f"{name}-schedule-analysis_final_bundles.txt").write_text(
            f"Schedule analysis:\n\ttotal scheduled bundles:    {bundles}\n\t{program}\n"
        )
    # 384 rows, in tiles of 128 or of one block, of four matrices
    assert tpu.scheduled(tmp_path, "first", 1) == {(4, 256, 384): 100 * 4 * 3}
    assert tpu.scheduled(tmp_path, "first", 256) == {(4, 256, 384): 100 * 4 * 2}


def test_a_topology_that_cannot_be_compiled_for_ends_with_a_line():
    with pytest.raises(SystemExit, match=r"error: cannot compile for v0:1x1: .*libtpu"):
        tpu.main(tpu.Args(topology="v0:1x1"))


@pytest.mark.parametrize("kind", ["v5e", "v6e"])
def test_the_table_of_tpus_is_of_its_rows(kind):
    page = (DOCS / "benchmarks.md").read_text()
    page = page[page.index("## On a TPU") :]
    rows = json.loads((DOCS / "results" / f"tpu-{kind}.json").read_text())["steps"]
    cycles = {
        (row["optimizer"], row["block_rows"], row["rows"]): row["xla_cycles"] + row["kernel_cycles"]
        for row in rows
    }
    table = {
        "AdamW": ("adamw", None),
        "Nora, XLA": ("step-xla", 1),
        "Nora, kernels": ("step-pallas", 1),
        "blocks of 128, XLA": ("step-xla", 128),
        "blocks of 128, kernels": ("step-pallas", 128),
        "Muon in bfloat16": ("muon-bfloat16", None),
    }
    column = {"v5e": 2, "v6e": 3}[kind]
    for name, case in table.items():
        (line,) = [line for line in page.splitlines() if line.startswith(f"| {name} |")]
        cell = line.strip("|").split("|")[column].strip()
        assert cell == " / ".join(f"{cycles[*case, rows]:.0f}" for rows in ("first", "last"))


HLO = """HloModule step

%fused (a: f32[8]) -> f32[8] {
  ROOT %inner.1 = f32[8]{0} add(%a, %a)
}

ENTRY %main.2 (a: f32[8], b: bf16[4,2]) -> (f32[8], pred[8]) {
  %a = f32[8]{0} parameter(0)
  %b = bf16[4,2]{1,0} parameter(1)
  %both = (f32[8]{0}, pred[8]{0}) fusion(%a, %a, /*index=2*/%b), kind=kLoop, calls=%fused
  %first = f32[8]{0} get-tuple-element(%both), index=0
  ROOT %last = f32[] reduce(%first, %first), dimensions={0}
}
"""


def test_bytes_are_those_that_instructions_read_and_write():
    # A free instruction moves nothing, and what is read twice counts once.
    assert passes.moved(HLO) == {"both": 32 + 16 + 32 + 8, "last": 32 + 4}


def test_without_a_compiler_for_gpus_a_line_says_what_to_install(monkeypatch):
    for name in ("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "")  # so that what the command sets is gone after it
    monkeypatch.setattr(passes, "H200", "none such")
    with pytest.raises(SystemExit, match=r"error: cannot compile for a GPU: .*jax\[cuda12\]"):
        passes.main(passes.Args(set="tiny"))


def test_the_table_of_bytes_is_of_its_rows():
    page = (DOCS / "benchmarks.md").read_text()
    page = page[page.index("## Bytes that a step moves") :]
    rows = json.loads((DOCS / "results" / "passes-h200.json").read_text())["steps"]
    moved = {(r["optimizer"], r["block_rows"], r["rows"]): r["bytes"] for r in rows}
    table = {"AdamW": ("adamw", None), "Nora, XLA": ("step-xla", 1)}
    table |= {f"blocks of {b}, XLA": ("step-xla", b) for b in (64, 128, 256, 512)}
    table |= {"Muon in bfloat16": ("muon-bfloat16", None)}
    for name, case in table.items():
        line = next(line for line in page.splitlines() if line.startswith(f"| {name} |"))
        cells = [cell.strip() for cell in line.strip("|").split("|")[1:]]
        assert cells == [f"{moved[*case, rows]:.0f}" for rows in ("first", "last")]
