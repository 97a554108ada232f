#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The main job on any machine: tiny checkpoint, conversion, GRPO with the bridge and with the baseline, table and plot.
set -euo pipefail
cd "$(dirname "$0")"
. tools/setup.sh
exec .venv/bin/python tools/quickstart.py "$@"
