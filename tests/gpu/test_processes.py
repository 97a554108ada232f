# SPDX-License-Identifier: Apache-2.0
"""Fresh processes agree: nothing is chosen by timing, and nothing depends on what ran before."""

import json
import subprocess
import sys
from pathlib import Path

from op_digests import digests


def test_two_fresh_processes_agree_with_this_one():
    script = Path(__file__).with_name("op_digests.py")
    runs = [
        json.loads(
            subprocess.run([sys.executable, script], capture_output=True, text=True, check=True).stdout.splitlines()[-1]
        )
        for _ in range(2)
    ]
    assert runs[0] == runs[1] == digests()
