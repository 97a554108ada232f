# SPDX-License-Identifier: Apache-2.0
"""Bit comparison, difference metrics, the gate and the recorder."""
