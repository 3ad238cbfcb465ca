"""docs/comparison.md says what its rows say."""

import math
import re
from pathlib import Path

import pytest

from docs.figures import comparison, yardstick
from examples.llama import cli, records
from examples.llama.config import Config
from examples.llama.plot import mean_loss
from examples.llama.sweep import read_grid

PAGE = Path(yardstick.DOCS, "comparison.md").read_text("utf-8")
TEXT = " ".join(PAGE.split())
GRIDS = yardstick.DOCS.parent / "examples/llama/grids"
LEFT_OUT = {"deflate", "radial", "keep_row_norms"}  # flags that the trainer once had


@pytest.fixture(scope="module")
def rows():
    return yardstick.load()


@pytest.fixture(scope="module")
def best(rows):
    names = yardstick.OPTIMIZERS + yardstick.BLOCKS
    return {name: yardstick.seeds_of_best(rows, name) for name in names}


@pytest.fixture(scope="module")
def apart(rows):
    """How far apart two groups of runs are, in standard errors of the difference."""

    def in_errors(low: list[dict], high: list[dict]) -> float:
        error = yardstick.noise(rows) * math.sqrt(1 / len(low) + 1 / len(high))
        return (mean_loss(high) - mean_loss(low)) / error

    return in_errors


def only(rows: list[dict], **fields) -> list[dict]:
    """The best run with these fields."""
    return [min(yardstick.pick(rows, **fields), key=lambda row: row["loss"])]


@pytest.mark.parametrize("name", comparison.HEAD)
def test_the_tables_are_those_of_the_rows(name):
    lines = comparison.tables()[name]
    assert len(lines) > 3
    assert "\n".join(lines) in PAGE


def test_what_is_before_is_twice_the_error_before(best, apart):
    last = ("rmnp", "mano", "nora")
    assert abs(apart(best["muon"], best["blocks of 256"])) < 2
    for first in ("muon", "blocks of 256"):
        assert apart(best[first], best["blocks of 128"]) > 2
    assert apart(best["blocks of 128"], best["adamw"]) > 2
    assert all(apart(best["adamw"], best[name]) > 2 for name in last)
    assert f"AdamW is {mean_loss(best['adamw']) - mean_loss(best['muon']):.2f} above Muon" in TEXT


def test_the_sentences_on_rates(rows, best, apart):
    worst = {}
    for name, tuned in best.items():
        rate, other = (tuned[0]["run"][k] for k in ("learning_rate", "adam_learning_rate"))
        by_rate = [comparison.losses_by_rate(rows, name, x) for x in (comparison.TUNED_AT, other)]
        beside = [
            losses[near] - losses[rate]
            for losses in by_rate
            for near in (0.5 * rate, 2 * rate)
            if near in losses
        ]
        worst[name] = f"{max(beside):.2f}"
    assert worst["nora"] == worst["rmnp"]
    assert worst["blocks of 128"] == worst["blocks of 256"]
    assert (
        f"costs blocks {worst['blocks of 128']}, Muon {worst['muon']}, AdamW {worst['adamw']}, "
        f"Nora and RMNP {worst['nora']}, Mano {worst['mano']}"
    ) in TEXT

    def at(name, other):
        same = {k: best[name][0]["run"][k] for k in ("learning_rate", "weight_decay")}
        return only(rows, optimizer=name, seed=0, adam_learning_rate=other, **same)

    assert "All gain from 0.0025 to 0.01. From 0.02 to 0.04 nothing changes" in TEXT
    for name in yardstick.OPTIMIZERS:
        assert apart(at(name, 0.01), at(name, 0.0025)) > 2
        assert abs(apart(at(name, 0.02), at(name, 0.04))) < 2
    for name in ("nora", "mano"):
        assert all(apart(at("rmnp", other), at(name, other)) > 2 for other in (0.02, 0.04))


def test_the_sentences_on_decay_and_precision(rows, apart):
    def at(name, **fields):
        return yardstick.at_best(rows, name, seed=0, **fields)

    gain = {
        name: mean_loss(at(name, weight_decay=0.0)) - mean_loss(at(name, weight_decay=0.1))
        for name in yardstick.OPTIMIZERS
    }
    assert {f"{gain.pop(name):.2f}" for name in ("rmnp", "muon")} == {"0.02"}
    assert max(gain.values()) < 0.0105
    assert "Decay gains 0.02 for RMNP and Muon, at most 0.01 for the others" in TEXT
    assert f"with it Nora gains {gain['nora']:.2f}" in TEXT
    assert abs(apart(at("nora", weight_decay=0.1), at("rmnp", weight_decay=0.1))) < 2
    cost = {}
    for name in yardstick.OPTIMIZERS:
        mixed, copies, low = (
            at(name, precision=mode) for mode in ("mixed", "bfloat16_master", "bfloat16")
        )
        assert abs(apart(mixed, copies)) < 2
        cost[name] = f"{mean_loss(low) - mean_loss(mixed):.2f}"
        assert (apart(mixed, low) > 2) == (name != "muon")
    assert {cost[name] for name in ("rmnp", "mano", "adamw")} == {"0.01", "0.02"}
    assert f"costs Nora {cost['nora']}, RMNP, Mano and AdamW 0.01 to 0.02, Muon nothing" in TEXT
    plain, decayed = (
        mean_loss(yardstick.at_best(rows, "nora", steps=10_000, weight_decay=x)) for x in (0.0, 0.1)
    )
    assert f"Decay costs Nora {decayed - plain:.2f} here" in TEXT


def test_the_other_sentences(rows, best, apart):
    def behind_muon(of):
        return f"{of['nora'] - of['muon']:.2f}"

    ends = {name: mean_loss(only(rows, optimizer=name)) for name in ("sso", "adamp")}
    assert f"SSO ends at {ends['sso']:.4f}" in TEXT
    assert f"AdamP at {ends['adamp']:.4f}" in TEXT

    pair = ("nora", "muon")
    few, many = (
        behind_muon({name: mean_loss(only(rows, optimizer=name, **size)) for name in pair})
        for size in ({"batch": 256, "steps": 600}, {"steps": 10_000})
    )
    usual = behind_muon({name: mean_loss(best[name]) for name in pair})
    assert f"{few} behind Muon here, {usual} after 3,000 steps, {many} after 10,000" in TEXT

    long = {name: only(rows, optimizer=name, steps=10_000) for name in (*pair, "rmnp", "adamw")}
    assert apart(long["muon"], long["rmnp"]) > 2
    assert all(apart(long["rmnp"], long[name]) > 2 for name in ("adamw", "nora"))
    assert abs(apart(long["adamw"], long["nora"])) < 2

    options = {(a, b): float(c) for a, b, c in comparison.options(rows)}
    plain = options.pop(("none", "0.002"))
    assert f"look-ahead gains {options.pop(('momentum 1.0', '0.002')) - plain:.3f}" in TEXT
    width = options.pop(("row_scale width, base_fan_in 512", "0.002"))
    assert f"default scale {width - plain:.3f} on `width`" in TEXT
    low, _, high = (
        mean_loss(yardstick.at_best(rows, "nora", row_scale="rms", learning_rate=x))
        for x in (0.00025, 0.0005, 0.001)
    )
    assert f"at half and at twice that it ends at {low:.3f} and {high:.3f}" in TEXT
    mano = mean_loss(yardstick.at_best(rows, "mano", seed=0, weight_decay=0.0))
    nora = mean_loss(yardstick.at_best(rows, "nora", seed=0, momentum=1.0))
    assert f"Nora ends at {nora:.3f}, and Mano, which has none, at {mano:.3f}" in TEXT
    two = 2 * math.sqrt(2) * yardstick.noise(rows)
    assert all(abs(loss - plain) < two for loss in options.values())


@pytest.fixture(scope="module")
def between(rows):
    """The difference of two groups of runs with its standard error, as the page has it."""

    def text(low: list[dict], high: list[dict]) -> str:
        error = yardstick.noise(rows) * math.sqrt(1 / len(low) + 1 / len(high))
        return f"{mean_loss(high) - mean_loss(low):.3f} ± {error:.3f}"

    return text


def tuned_and_scripts(rows: list[dict], steps: int) -> tuple[dict, dict]:
    """The runs of each, tuned and with the settings of the paper's scripts."""
    names = ("nora", "mano", "rmnp", "muon")
    tuned = {name: yardstick.at_best(rows, name, steps=steps) for name in names}
    scripts = {
        name: yardstick.at_best(rows, name, steps=steps, **comparison.scripts(name))
        for name in names
    }
    return tuned, scripts


def test_the_settings_of_the_scripts_turn_the_order_around(rows, apart, between):
    tuned, scripts = tuned_and_scripts(rows, 10_000)
    assert not tuned.pop("mano")
    assert not scripts.pop("mano")
    assert all(len(runs) == 1 for groups in (tuned, scripts) for runs in groups.values())
    for groups, order in ((scripts, ("nora", "rmnp", "muon")), (tuned, ("muon", "rmnp", "nora"))):
        first, second, third = (groups[name] for name in order)
        assert apart(first, second) > 2
        assert apart(second, third) > 2
    nora, rmnp, muon = scripts.values()
    assert (
        f"Nora is {between(nora, rmnp)} before RMNP, and RMNP {between(rmnp, muon)} before Muon"
    ) in TEXT
    assert f"Nora is {between(nora, muon)} before Muon; tuned" in TEXT
    nora, rmnp, muon = tuned.values()
    assert (
        f"Muon is {between(muon, rmnp)} before RMNP, and RMNP {between(rmnp, nora)} before Nora"
    ) in TEXT
    assert f"tuned, Muon is {between(muon, nora)} before Nora" in TEXT


def test_what_the_scripts_cost(rows, apart, between):
    tuned, scripts = tuned_and_scripts(rows, 10_000)
    assert (
        f"They cost Muon {between(tuned['muon'], scripts['muon'])} "
        f"and RMNP {between(tuned['rmnp'], scripts['rmnp'])}. "
        f"Nora gains {between(scripts['nora'], tuned['nora'])}"
    ) in TEXT
    assert apart(scripts["nora"], tuned["nora"]) > 2

    tuned, scripts = tuned_and_scripts(rows, 3000)
    assert all(len(runs) == 2 for runs in scripts.values())
    assert abs(apart(tuned["nora"], scripts["nora"])) < 2
    cost = {name: between(tuned[name], scripts[name]) for name in ("muon", "rmnp", "mano")}
    assert all(text.endswith(" ± 0.003") for text in cost.values())
    muon, rmnp, mano = (text.split()[0] for text in cost.values())
    assert f"cost Muon {muon}, RMNP {rmnp} and Mano {mano}, each ± 0.003" in TEXT
    assert abs(apart(scripts["muon"], scripts["mano"])) < 2
    for name in ("muon", "mano"):
        assert apart(scripts["nora"], scripts[name]) > 2
        assert apart(scripts[name], scripts["rmnp"]) > 2


def test_it_takes_both_settings_to_put_muon_last(rows, apart, between):
    _, scripts = tuned_and_scripts(rows, 3000)
    other = {"precision": "mixed", "weight_decay": 0.1}
    settings = comparison.scripts("muon")
    rate, precision = (
        yardstick.at_best(rows, "muon", **settings | fields)
        for fields in (other, {"adam_learning_rate": 0.005})
    )
    before = [between(runs, scripts["nora"]) for runs in (rate, precision)]
    assert all(text.endswith(" ± 0.003") for text in before)
    rate, precision = (text.split()[0] for text in before)
    assert f"After 3,000 steps with AdamW's rate of 0.001 alone it is {rate} before it" in TEXT
    assert f"of the others, {precision}, each ± 0.003" in TEXT


def test_how_far_the_last_steps_fall(rows):
    falls = []
    for groups in tuned_and_scripts(rows, 10_000):
        for name in ("muon", "rmnp", "nora"):
            losses = {step: loss for step, loss, _ in groups[name][0]["held_out"]}
            falls.append(f"{losses[8000] - losses[10_000]:.3f}")
    muon, rmnp, nora, *scripts = falls
    assert "Muon falls by {}, RMNP by {}, Nora by {}".format(*scripts) in TEXT
    assert f"tuned, by {muon}, {rmnp} and {nora}" in TEXT


def test_who_is_lowest_along_the_long_runs(rows):
    names = ("muon", "adamw", "rmnp", "nora")
    losses = {
        name: {step: loss for step, loss, _ in run["held_out"]}
        for name in names
        for run in yardstick.at_best(rows, name, steps=10_000)
    }

    def in_order(step):
        return sorted(names, key=lambda name: losses[name][step])

    assert all(in_order(step)[::3] == ["muon", "nora"] for step in range(500, 2001, 500))
    assert {in_order(step)[0] for step in range(2500, 7501, 500)} == {"adamw"}
    assert in_order(10_000)[0] == "muon"
    second = losses[in_order(1000)[1]][1000] - losses["muon"][1000]
    assert f"Muon is lowest, by {second:.2f} at step 1,000" in TEXT


def test_the_parabola_hardly_needs_any_of_its_lengths(rows, best):
    def more(rows):
        texts = (yardstick.more_steps(rows, best[name]) for name in best if name != "muon")
        return [int(text.split(" ±")[0]) for text in texts]

    full = more(rows)
    *shorter, _ = yardstick.muon_by_steps(rows)
    for length in shorter:
        fewer = more([row for row in rows if row["run"]["steps"] != length])
        assert all(abs(a - b) <= 1 for a, b in zip(full, fewer, strict=True))


def test_the_readme_has_the_numbers_of_the_table(rows, best):
    readme = (yardstick.DOCS.parent / "README.md").read_text("utf-8")
    head, *lines = (
        line.strip("| ").split(" | ") for line in readme.splitlines() if line.startswith("|")
    )
    names = [name.lower() for name in head[1:]]
    table = {line[0]: line for line in comparison.main(rows)}
    said = {line[0]: dict(zip(names, line[1:], strict=False)) for line in lines}
    for name in names:
        assert said["held-out loss"][name] == f"{mean_loss(best[name]):.3f}"
        more = said["more steps than Muon for the same loss"].get(name, "0 %")
        assert more == f"{int(table[name][2].split()[0])} %"


def test_tokens_for_each_parameter_and_passes_over_the_text():
    width, mlp, layers, vocabulary = 512, 1376, 8, 32_000
    size = 2 * vocabulary * width + layers * (4 * width**2 + 3 * width * mlp)
    assert f"LLaMA of {size / 1e6:.0f}M parameters" in TEXT
    few, usual, long = (n / size for n in (600 * 65_536, 3000 * 16_384, 10_000 * 16_384))
    assert f"{few:.1f} to {usual:.2f} tokens for each parameter, and {long:.1f} in" in TEXT
    assert f"({10_000 / comparison.PASS:.1f} passes over the text" in TEXT


def test_the_lengths_of_muon_are_those_that_were_run(rows):
    *parts, most = (f"{100 * steps / 3000:.0f}" for steps in yardstick.muon_by_steps(rows))
    assert f"Muon is run at {', '.join(parts)} and {most} % of the steps" in TEXT


def test_blocks_in_few_steps(rows, apart):
    few = {"batch": 256, "steps": 600}
    muon, adamw = (only(rows, optimizer=name, **few) for name in ("muon", "adamw"))
    blocks = [only(rows, optimizer=f"blocks of {b}", **few) for b in (64, 128, 256)]
    assert all(apart(runs, adamw) > 2 for runs in blocks)
    assert f"those of 256 are {mean_loss(blocks[-1]) - mean_loss(muon):.2f} behind Muon" in TEXT


def test_more_steps_by_hand():
    """Muon's loss falls by 1 where its steps double: what is 1 above took twice the steps."""
    tuned = {"optimizer": "muon", "learning_rate": 0.01, "adam_learning_rate": 0.01}
    tuned |= yardstick.USUAL | {"weight_decay": 0.1}

    def row(loss, seed=0, **fields):
        name = fields.get("optimizer", "muon")
        return {"run": tuned | fields | {"seed": seed}, "loss": loss, "name": name}

    others = [n for n in yardstick.OPTIMIZERS + yardstick.BLOCKS if n != "muon"]
    seeds = [
        row(5 + (-1) ** seed * 0.001, seed, optimizer=name, weight_decay=0.1 * (name != "nora"))
        for name in others
        for seed in (0, 1)
    ]
    full = [row(3 + (-1) ** seed * 0.001, seed) for seed in (0, 1)]
    assert yardstick.more_steps(seeds + full, [row(4)]) == "not run"
    rows = seeds + full + [row(4, steps=1500), row(5, steps=750)]
    noise = yardstick.noise(rows)
    assert noise == pytest.approx(math.sqrt(2) * 0.001)
    assert yardstick.spread([full]) == pytest.approx((noise, noise / math.sqrt(2)))
    # At 4.5 the parabola weighs the ends by 3/8 and -1/8, the middle by 3/4; two seeds at 3.
    error = 2**1.5 * math.log(2) * noise * math.sqrt(1 + 9 / 64 + 9 / 16 + 1 / 64 / 2)
    assert yardstick.more_steps(rows, [row(4.5)]) == f"+183 ± {100 * error:.0f} %"
    assert yardstick.more_steps(rows, [row(3)]).startswith("+0 ±")
    assert yardstick.more_steps(rows, [row(2)]).startswith("-50 ±")
    assert yardstick.more_steps(rows, [row(5.1)]) == "over 300 %"


def test_what_was_run_again_came_out_as_before():
    before = yardstick.read(yardstick.ROWS)
    again = yardstick.read(yardstick.AGAIN)
    pairs = [(row, old) for row in again for old in before if old["run"] == row["run"]]
    assert {row["name"] for row, _ in pairs} == set(yardstick.OPTIMIZERS)
    assert all(abs(row["loss"] - old["loss"]) <= 0.0011 for row, old in pairs)


def test_every_row_is_of_one_text_one_model_and_has_a_loss(rows):
    for field in ("text", "model.width", "model.layers", "model.vocab_size", "clip"):
        assert len({row["run"][field] for row in rows}) == 1
    assert all(
        row["held_out"][-1][:2] == [row["run"]["steps"], row["held_out_loss"]] for row in rows
    )


def test_every_row_is_of_the_grids_that_the_page_names():
    def known(run):
        return {k: v for k, v in run.items() if k not in LEFT_OUT}

    runs = re.findall(r'^    run (\w+) "?([\w ]+?)"?(?: \S*best.*)?$', PAGE, re.M)
    files = {path.stem for path in yardstick.RESULTS.glob("*.jsonl")}
    assert files <= {name for name, _ in runs}
    every = re.findall(r"--preset 60m.*\\\n.*(?= &)", PAGE)[0].replace("\\\n", "").split()
    every += ["--precision", "mixed"]  # what it is on a GPU
    best = []
    fields = cli.identity(Config(), "")  # what an older trainer did not record is default
    for name, grids in runs:
        paths = [GRIDS / f"{grid}.yaml" for grid in grids.split()]
        configs = [config for path in paths for config in read_grid(path, every, best)]
        if name not in files:
            continue
        rows = records.read(yardstick.RESULTS / f"{name}.jsonl")
        wanted = [known(cli.identity(config, rows[0]["run"]["text"])) for config in configs]
        rows = [row for row in rows if not any(row["run"].get(flag) for flag in LEFT_OUT)]
        assert all(known(fields | row["run"]) in wanted for row in rows), name
        best += rows if name in ("rates", "adam") else []


def test_help_writes_nothing(capsys):
    written = [*yardstick.RESULTS.glob("*.svg"), yardstick.DOCS / "comparison.md"]
    times = {path: path.stat().st_mtime_ns for path in written}
    with pytest.raises(SystemExit):
        comparison.run(["--help"])
    assert "--write" in capsys.readouterr().out
    assert times == {path: path.stat().st_mtime_ns for path in written}
