# SPDX-License-Identifier: Apache-2.0
"""Tasks keep the columns and the entry script of SWE-bench Pro, wherever they come from."""

import json
import shutil
import subprocess

import pytest
from swe_workbench import own_tasks

from examples.swe_bench_pro.tasks.columns import COLUMNS, read_row, write_row
from examples.swe_bench_pro.tasks.own import OWN_TASKS, load_folder
from examples.swe_bench_pro.tasks.public import public_tasks, read_offline, read_revision


def git(origin, *arguments):
    done = subprocess.run(["git", "-C", str(origin), *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_own_tasks_are_eight_repositories_with_the_fix_in_their_history():
    tasks = own_tasks()
    assert len(tasks) == 8
    for task in tasks.values():
        assert git(task.origin, "rev-parse", "HEAD") == task.base_commit
        assert git(task.origin, "rev-parse", f"{task.fix_commit}^") == task.base_commit
        assert git(task.origin, "status", "--porcelain") == ""
        assert task.fail_to_pass
        changed = git(task.origin, "diff", "--name-only", task.base_commit, task.fix_commit).split()
        assert len([name for name in changed if not name.startswith("tests/")]) >= 2, "a task needs several files"
        hidden = [name for name in changed if name.startswith("tests/")]
        assert set(hidden) <= set(task.selected_test_files_to_run)


def test_own_tasks_are_functions_of_their_files(tmp_path):
    again = {task.instance_id: task.base_commit for task in load_folder(OWN_TASKS, tmp_path)}
    assert again == {task.instance_id: task.base_commit for task in own_tasks().values()}


def test_columns_survive_a_round_trip():
    task = own_tasks()["ledger"]
    row = write_row(task)
    assert set(row) == set(COLUMNS)
    assert all(isinstance(value, str) for value in row.values())
    again = read_row(row, run_script=task.run_script, parser=task.parser, origin=task.origin)
    assert again == task


def test_entry_script_has_the_official_order():
    task = own_tasks()["ledger"]
    tests, parse = task.entry_script()
    hidden = task.before_repo_set_cmd.splitlines()[-1]
    steps = [f"git reset --hard {task.base_commit}", "git apply -v /workspace/patch.diff", hidden, "run_script.sh"]
    places = [tests.index(step) for step in steps]
    assert places == sorted(places)
    assert "set -e" not in tests
    assert parse == "python /workspace/parser.py /workspace/stdout.log /workspace/stderr.log /workspace/output.json\n"


def test_read_row_lists_every_problem():
    row = write_row(own_tasks()["ledger"]) | {"fail_to_pass": "nope(", "base_commit": "main"}
    del row["interface"]
    with pytest.raises(ValueError, match="interface is missing"):
        read_row(row, run_script="", parser="")
    with pytest.raises(ValueError) as error:
        read_row(row | {"interface": ""}, run_script="", parser="")
    assert "fail_to_pass" in str(error.value)
    assert "base_commit" in str(error.value)


def test_folder_without_patch_is_named(tmp_path):
    shutil.copytree(OWN_TASKS, tmp_path / "tasks")
    (tmp_path / "tasks" / "ledger_split" / "gold.patch").unlink()
    with pytest.raises(ValueError, match="ledger_split lacks gold.patch"):
        load_folder(tmp_path / "tasks", tmp_path / "repositories")


def checkout(tmp_path, names):
    for name in names:
        for kind in ("base", "instance"):
            folder = tmp_path / "pro" / "dockerfiles" / f"{kind}_dockerfile" / name
            folder.mkdir(parents=True)
            (folder / "Dockerfile").write_text(f"FROM x\nENV KIND_{kind.upper()}=1\nRUN true\n")
        scripts = tmp_path / "pro" / "run_scripts" / name
        scripts.mkdir(parents=True)
        (scripts / "run_script.sh").write_text("run\n")
        (scripts / "parser.py").write_text("parse\n")
    return tmp_path / "pro"


def test_public_rows_join_their_scripts_offline(tmp_path):
    rows = [write_row(task) | {"dockerhub_tag": "tag"} for task in own_tasks().values()][:3]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pro = checkout(tmp_path, [row["instance_id"] for row in rows])
    tasks = public_tasks(read_offline(tmp_path / "data"), pro)
    assert [task.instance_id for task in tasks] == [row["instance_id"] for row in rows]
    assert tasks[0].image == "jefzda/sweap-images:tag"
    assert tasks[0].entry_script()[0].startswith("export KIND_BASE=1\nexport KIND_INSTANCE=1\ncd /app\n")
    wanted = rows[1]["instance_id"]
    assert [task.instance_id for task in public_tasks(rows, pro, only=[wanted])] == [wanted]


def test_public_loader_names_what_is_absent(tmp_path):
    rows = [write_row(task) for task in own_tasks().values()][:2]
    pro = checkout(tmp_path, [rows[0]["instance_id"]])
    with pytest.raises(ValueError) as error:
        public_tasks(rows, pro, only=[rows[0]["instance_id"], rows[1]["instance_id"], "instance_gone"])
    assert rows[1]["instance_id"] in str(error.value)
    assert "instance_gone is wanted" in str(error.value)
    with pytest.raises(ValueError, match="a branch moves"):
        read_revision("main")
    with pytest.raises(ValueError, match="no \\*.jsonl"):
        read_offline(tmp_path / "pro")
