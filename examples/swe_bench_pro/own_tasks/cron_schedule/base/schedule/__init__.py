# SPDX-License-Identifier: Apache-2.0
"""Schedules of five fields, as in a crontab."""
