"""Runs in processes of their own: several hosts, SIGTERM, and kill -9 at any moment."""

import os
import random
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
from logs import metrics

pytestmark = pytest.mark.slow

MODEL = "--model.vocab-size 304 --model.context 16 --model.width 32 --model.layers 1 "
MODEL += "--model.heads 4 --model.mlp-width 48 --precision float32"


@pytest.fixture
def start(corpus, tmp_path):
    """Starts the command, on `devices` fake ones."""
    started = []

    def command(*arguments: str, devices: int = 1) -> subprocess.Popen:
        flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
        environment = os.environ | {"XLA_FLAGS": flags}
        given = [*MODEL.split(" "), "--out", str(tmp_path), "--data.path", str(corpus.folder)]
        run = [sys.executable, "-m", "examples.llama.train", *given, *" ".join(arguments).split()]
        started.append(
            subprocess.Popen(
                run, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
        return started[-1]

    yield command
    for process in started:
        process.kill()
        process.communicate()


def finish(process: subprocess.Popen) -> str:
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    return out


def wait_for(path, lines: int, process: subprocess.Popen) -> None:
    while not (path.exists() and len(path.read_text().splitlines()) >= lines):
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


def test_sigterm_saves_and_the_run_goes_on(start, tmp_path):
    settings = "--steps 400 --batch 4 --log-every 1 --eval-every 400 --save-every 400"
    finish(start(settings, "--name whole"))
    stopped = start(settings, "--name parts")
    wait_for(tmp_path / "parts" / "metrics.jsonl", 5, stopped)
    stopped.send_signal(signal.SIGTERM)
    assert "go on with --resume --name parts" in finish(stopped)
    assert 3 < metrics(tmp_path / "parts")[-1]["step"] < 400
    finish(start("--resume --name parts"))
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole")


def test_a_run_killed_at_random_ends_with_the_same_bits(start, tmp_path):
    """Killed in the middle of steps and of saves: every second step is saved."""
    kills = int(os.environ.get("KILLS", "3"))
    steps = 24 * (kills + 1)  # a round is killed long before 24
    settings = f"--steps {steps} --batch 4 --log-every 1 --eval-every 12"
    finish(start(settings, "--name whole", f"--save-every {steps}"))
    rng = random.Random(0)
    process = start(settings, "--name parts --save-every 2")
    for killed in range(kills):
        lines = len(metrics(tmp_path / "parts")) if killed else 0
        wait_for(tmp_path / "parts" / "metrics.jsonl", lines + rng.randrange(1, 8), process)
        time.sleep(rng.uniform(0, 0.1))
        process.kill()
        process.communicate()
        process = start("--resume --name parts")
    finish(process)
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole")


def test_two_hosts_of_four_devices_equal_one_of_eight(start, tmp_path):
    settings = "--steps 6 --batch 8 --log-every 1 --eval-every 3 --save-every 3 --mesh.fsdp 4"
    finish(start(settings, "--name one", devices=8))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"

    def both(*arguments: str) -> list[str]:
        hosts = f"--hosts.coordinator {address} --hosts.count 2 --hosts.index"
        processes = [start(*arguments, hosts, str(i), devices=4) for i in range(2)]
        return [finish(process) for process in processes]

    first, second = both(settings, "--name two")
    assert "held-out loss" in first
    assert "held-out" not in second  # one writer
    one, two = metrics(tmp_path / "one"), metrics(tmp_path / "two")
    assert [line["step"] for line in one] == [line["step"] for line in two]
    for name in ("loss", "held_out_loss"):
        a, b = ([line[name] for line in lines if name in line] for lines in (one, two))
        np.testing.assert_allclose(a, b, atol=1e-5)  # rows in another order within each batch
