# SPDX-License-Identifier: Apache-2.0
"""What changed."""

from settings.flat import flat
from settings.read import read


def changes(old_text, new_text):
    """Return lines `+ name = value`, `- name`, `~ name = old -> new`, ordered by name."""
    old, new = flat(read(old_text)), flat(read(new_text))
    lines = []
    for name in sorted(new):
        if name not in old:
            lines.append(f"+ {name} = {new[name]}")
        elif old[name] != new[name]:
            lines.append(f"~ {name} = {old[name]} -> {new[name]}")
    return lines
