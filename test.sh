#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Everything that must pass; arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")"
. tools/setup.sh
.venv/bin/ruff check .
exec .venv/bin/python -m pytest "$@"
