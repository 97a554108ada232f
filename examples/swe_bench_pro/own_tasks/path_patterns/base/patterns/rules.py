# SPDX-License-Identifier: Apache-2.0
"""An ordered list of rules, as in an ignore file."""

from patterns.path import path_matches


def ignored(rules, path):
    """Tell whether the rules ignore `path`; a rule that starts with `!` takes a path back."""
    for rule in rules:
        if path_matches(rule.removeprefix("!"), path):
            return not rule.startswith("!")
    return False
