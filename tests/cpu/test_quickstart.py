# SPDX-License-Identifier: Apache-2.0
"""The quickstart's own folder, its arguments, and that no trainer outlives it; trainers here only sleep."""

import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.vllm_forward.orphans import STARTER
from vllm_forward_bridge.config import load

ROOT = Path(__file__).parents[2]
QUICKSTART = runpy.run_path(str(ROOT / "tools" / "quickstart.py"))
# What `python -m megatron.vllm_forward` does first, then nothing.
SLEEPER = """
import sys, time
from megatron.vllm_forward.orphans import end_with_parent
end_with_parent(__name__)
print("up", flush=True)
time.sleep(300)
"""
STARTED = """
import runpy, sys
from pathlib import Path
quickstart = runpy.run_path(sys.argv[1])
quickstart["_exit_on_signals"]()
quickstart["_train"]([sys.executable, "-c", sys.argv[3]], Path(sys.argv[2]), lambda: None)
"""


def until(holds):
    for _ in range(600):
        if holds():
            return True
        time.sleep(0.1)
    return False


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_running(pid):
    # An orphan stays as a zombie where the first process of a container collects none.
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_no_trainer_outlives_the_quickstart(tmp_path, number):
    command = [sys.executable, "-c", STARTED, str(ROOT / "tools" / "quickstart.py"), str(tmp_path), SLEEPER]
    with subprocess.Popen(command) as quickstart:
        log = tmp_path / "log.txt"
        assert until(lambda: log.exists() and log.read_text() == "up\n")
        (trainer,) = children(quickstart.pid)
        quickstart.send_signal(number)
        assert quickstart.wait() == (-number if number == signal.SIGKILL else 128 + number)
    if number == signal.SIGKILL:
        assert until(lambda: not is_running(trainer))
    assert not is_running(trainer)


def test_a_trainers_own_children_do_not_watch_its_starter():
    marked = "import os; from megatron.vllm_forward import orphans; orphans.end_with_parent('__main__')"
    command = [sys.executable, "-c", f"{marked}; print(*os.environ)"]
    environment = {**os.environ, STARTER: str(os.getpid())}
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert STARTER not in shown.stdout.split()


@pytest.mark.parametrize("mode", QUICKSTART["MODES"])
def test_configuration_names_the_folders_own_checkpoint(tmp_path, mode):
    home = tmp_path / "elsewhere" / mode
    home.mkdir(parents=True)
    command = QUICKSTART["_command"](mode, home, tmp_path / "megatron", 3)
    written = load(command[command.index("--vllm-forward") + 1])
    example = load(ROOT / "examples" / "grpo_tiny" / f"{mode}.toml")
    assert Path(written.model.repository).resolve() == tmp_path / "elsewhere" / "tiny"
    assert written.digest == example.digest


@pytest.mark.parametrize("flag", ["--steps", "--every"])
@pytest.mark.parametrize("value", ["0", "-1", "1.5", "many"])
def test_counts_below_one_are_refused(flag, value, capsys):
    with pytest.raises(SystemExit):
        QUICKSTART["main"]([f"{flag}={value}"])
    assert f"argument {flag}: given {value!r}; a whole number from 1 on is needed" in capsys.readouterr().err
