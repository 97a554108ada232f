# SPDX-License-Identifier: Apache-2.0
"""Cut a template into text and fields."""


def scan(source):
    """Yield ("text", words) and ("field", path) in order."""
    while source:
        before, opening, rest = source.partition("{{")
        if before:
            yield "text", before
        if not opening:
            return
        path, _, source = rest.partition("}}")
        yield "field", path.strip()
