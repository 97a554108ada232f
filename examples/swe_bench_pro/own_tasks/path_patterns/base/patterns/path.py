# SPDX-License-Identifier: Apache-2.0
"""Whole paths."""

from patterns.segment import matches


def path_matches(pattern, path):
    """Tell whether a slash-separated path matches; `**` is any number of folders."""
    return _parts_match(pattern.split("/"), path.split("/"))


def _parts_match(pattern, parts):
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return any(_parts_match(pattern[1:], parts[at:]) for at in range(1, len(parts) + 1))
    return bool(parts) and matches(pattern[0], parts[0]) and _parts_match(pattern[1:], parts[1:])
