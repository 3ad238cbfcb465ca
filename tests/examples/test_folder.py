"""Folders appear whole, and one run at a time writes to one."""

import multiprocessing
import os
import signal

import pytest

from examples.llama import folder
from examples.llama.config import UserError


def hold(path, held):
    with folder.claimed(path, resume=False):
        held.set()
        signal.pause()


def fill(path, begun):
    with folder.whole(path) as partial:
        (partial / "half").touch()
        begun.set()
        signal.pause()


@pytest.fixture
def killed_within():
    """Starts `work(path, event)` in a process of its own; kills it, on being called, as -9 does."""
    context, started = multiprocessing.get_context("spawn"), []

    def start(work, path):
        event = context.Event()
        process = context.Process(target=work, args=(path, event))
        process.start()
        started.append(process)
        assert event.wait(30)

        def kill():
            os.kill(process.pid, signal.SIGKILL)
            process.join()

        return kill

    yield start
    for process in started:
        process.kill()
        process.join()


def test_a_folder_in_use_is_refused_until_its_process_dies(tmp_path, killed_within):
    kill = killed_within(hold, tmp_path / "run")
    with pytest.raises(UserError, match="is in use by a run that goes on"):
        folder.claimed(tmp_path / "run", resume=False).__enter__()
    kill()  # before it wrote its settings: the folder can be taken
    (tmp_path / "run" / "tokenizer.json").touch()
    (tmp_path / "run" / "config.json.partial").touch()
    with folder.claimed(tmp_path / "run", resume=False):
        folder.write_json(tmp_path / "run" / "config.json", {})
    with pytest.raises(UserError, match="already holds a run"):
        folder.claimed(tmp_path / "run", resume=False).__enter__()
    with folder.claimed(tmp_path / "run", resume=True):
        pass


def test_what_fails_before_its_settings_leaves_no_folder(tmp_path):
    with pytest.raises(UserError, match="bad text"), folder.claimed(tmp_path / "run", False):
        raise UserError("bad text")
    assert not list(tmp_path.iterdir())
    with pytest.raises(UserError, match="holds no run to resume"):
        folder.claimed(tmp_path / "run", resume=True).__enter__()
    assert not list(tmp_path.iterdir())


def test_a_killed_preparation_stands_in_nobodys_way(tmp_path, killed_within):
    kill = killed_within(fill, tmp_path / "text")
    with folder.whole(tmp_path / "text") as partial:  # one that goes on is left alone
        (partial / "all").touch()
        assert len(list(tmp_path.iterdir())) == 2
    kill()
    (tmp_path / "text" / "all").unlink()
    (tmp_path / "text").rmdir()
    with folder.whole(tmp_path / "text") as partial:
        (partial / "all").touch()
    assert [path.name for path in tmp_path.iterdir()] == ["text"]
    assert [path.name for path in (tmp_path / "text").iterdir()] == ["all"]
