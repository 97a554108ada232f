#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Everything that must pass; arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")"
. tools/setup.sh
# Tests start processes of their own; two OpenMP teams on two cores spin against each other.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
.venv/bin/ruff check .
exec .venv/bin/python -m pytest "$@"
