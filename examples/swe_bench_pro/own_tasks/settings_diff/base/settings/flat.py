# SPDX-License-Identifier: Apache-2.0
"""Names across sections."""


def flat(sections):
    """Return {"section.name": value}."""
    return {f"{section}.{name}": value for section, names in sections.items() for name, value in names.items()}
