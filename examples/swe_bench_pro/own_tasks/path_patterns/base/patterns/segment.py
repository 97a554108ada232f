# SPDX-License-Identifier: Apache-2.0
"""One path segment against one pattern segment."""


def matches(pattern, text):
    """Tell whether `text` matches; `*` is any run of characters, `?` is one."""
    if not pattern:
        return not text
    if pattern[0] == "*":
        return any(matches(pattern[1:], text[at:]) for at in range(len(text)))
    return bool(text) and pattern[0] in ("?", text[0]) and matches(pattern[1:], text[1:])
