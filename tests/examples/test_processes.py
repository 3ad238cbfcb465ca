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

    def command(*arguments: str, devices: int = 1, limit: int = 0) -> subprocess.Popen:
        flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
        environment = os.environ | {"XLA_FLAGS": flags}
        given = [*MODEL.split(" "), "--out", str(tmp_path), "--data.path", str(corpus.folder)]
        run = [sys.executable, "-m", "examples.llama.train", *given, *" ".join(arguments).split()]
        if limit:
            run = ["bash", "-c", f'ulimit -f {limit} && exec "$@"', "limited", *run]
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


def two_hosts() -> str:
    """The flags of two processes, but for the index of each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    return f"--hosts.coordinator {address} --hosts.count 2 --hosts.index"


def failed(process: subprocess.Popen, status: int = 1) -> str:
    """The one line that a process ends with."""
    _, err = process.communicate(timeout=120)
    assert process.returncode == status, err
    (line,) = [line for line in err.splitlines() if "error: " in line]
    assert "*** Check failure" not in err  # no page of C++
    return line


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
    hosts = two_hosts()
    processes = [start(settings, "--name two", hosts, str(i), devices=4) for i in range(2)]
    first, second = map(finish, processes)
    assert "held-out loss" in first
    assert "held-out" not in second  # one writer
    one, two = metrics(tmp_path / "one"), metrics(tmp_path / "two")
    assert [line["step"] for line in one] == [line["step"] for line in two]
    for name in ("loss", "held_out_loss"):
        a, b = ([line[name] for line in lines if name in line] for lines in (one, two))
        np.testing.assert_allclose(a, b, atol=1e-5)  # sequences in another order within each batch


def test_a_host_that_never_comes_is_waited_for_no_longer_than_told(start, tmp_path):
    hosts = two_hosts()
    for index, whom in (("0", "another process"), ("1", "process 0 at 127.0.0.1")):
        line = failed(start("--steps 2", hosts, index, "--hosts.timeout 3"))
        assert line.startswith(f"error: {whom}")
        assert line.endswith("has not come within 3 s (--hosts.timeout)")
    assert not list(tmp_path.iterdir())


def test_hosts_started_otherwise_are_refused(start, tmp_path):
    hosts = two_hosts()
    both = [start("--steps", str(6 + i), "--batch 8", hosts, str(i)) for i in range(2)]
    for process in both:
        line = failed(process)
        assert line == "error: process 1 was started otherwise than process 0: steps is 7, not 6"
    assert not list(tmp_path.iterdir())


def test_ctrl_c_on_one_host_stops_both(start, tmp_path):
    hosts, settings = two_hosts(), "--steps 20000 --batch 8 --log-every 1 --name two"
    both = [start(settings, hosts, str(i)) for i in range(2)]
    wait_for(tmp_path / "two" / "metrics.jsonl", 3, both[0])
    both[1].send_signal(signal.SIGINT)
    out = [finish(process) for process in both]
    assert "go on with --resume --name two" in out[0]


def test_a_host_that_cannot_write_ends_both(start):
    """Files of the second process may not grow beyond 1 kB."""
    settings = "--steps 20000 --batch 8 --log-every 1 --name two --hosts.timeout 15"
    hosts = two_hosts()
    begun = time.monotonic()
    first = start(settings, hosts, "0")
    second = start(settings, hosts, "1", limit=1)
    assert "a checkpoint cannot be written to" in failed(second)
    assert "a checkpoint cannot be written to" in failed(first)
    assert time.monotonic() - begun < 100  # not the 300 and more that jax and orbax wait


def test_ctrl_c_saves_and_a_run_that_goes_on_is_left_alone(start, tmp_path):
    settings = "--steps 20000 --batch 4 --log-every 1 --eval-every 20000 --save-every 20000"
    process = start(settings, "--name run")
    wait_for(tmp_path / "run" / "metrics.jsonl", 3, process)
    process.send_signal(signal.SIGINT)
    assert "go on with --resume --name run" in finish(process)
    reached = metrics(tmp_path / "run")[-1]["step"]
    process = start("--resume --name run")
    wait_for(tmp_path / "run" / "metrics.jsonl", reached + 3, process)
    other = start("--resume --name run")
    assert "is in use by a run that goes on" in failed(other)
    process.send_signal(signal.SIGTERM)
    finish(process)
    assert metrics(tmp_path / "run")[-1]["step"] > reached
