# SPDX-License-Identifier: Apache-2.0
"""Turn the record that run_script.sh leaves beside the logs into the grader's JSON; the logs are not read."""

import json
import sys
from pathlib import Path


def main(stdout_log: str, stderr_log: str, output: str) -> int:
    """Write `{"tests": [{"name", "status"}]}`; a test that reported twice keeps its last status."""
    record = Path(stdout_log).with_name("results.jsonl")
    rows = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    last = {row["name"]: row["status"] for row in rows if not row["name"].startswith("unittest/loader.py")}
    Path(output).write_text(json.dumps({"tests": [{"name": name, "status": status} for name, status in last.items()]}))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
