#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs the test files named in $1 (comma-separated) and records each result in a file outside the project: what the
# tested code prints is never read as a result.
exec python -B - "$1" <<'PYTHON'
import json
import sys
import unittest
from pathlib import Path

RECORD = Path("/workspace/results.jsonl")


class Recorder(unittest.TextTestResult):
    def write(self, test, status):
        module, name, method = test.id().rsplit(".", 2)
        row = {"name": f"{module.replace('.', '/')}.py::{name}::{method}", "status": status}
        with RECORD.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def addSuccess(self, test):
        super().addSuccess(test)
        self.write(test, "PASSED")

    def addFailure(self, test, error):
        super().addFailure(test, error)
        self.write(test, "FAILED")

    def addError(self, test, error):
        super().addError(test, error)
        self.write(test, "ERROR")

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        self.write(test, "SKIPPED")


sys.path.insert(0, "")
modules = [name.removesuffix(".py").replace("/", ".") for name in sys.argv[1].split(",")]
suite = unittest.defaultTestLoader.loadTestsFromNames(modules)
unittest.TextTestRunner(verbosity=2, resultclass=Recorder).run(suite)
PYTHON
