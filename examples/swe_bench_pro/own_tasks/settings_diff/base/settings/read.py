# SPDX-License-Identifier: Apache-2.0
"""Read a settings file."""


def read(text):
    """Return {section: {name: value}}; `#` starts a comment."""
    sections = {}
    section = sections.setdefault("", {})
    for line in text.splitlines():
        line = line.split("#")[0].strip()
        if line.startswith("["):
            section = sections.setdefault(line.strip("[]"), {})
        elif line:
            name, value = line.split("=")
            section[name.strip()] = value.strip()
    return sections
