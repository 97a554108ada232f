# SPDX-License-Identifier: Apache-2.0
"""Union and difference of lists of (start, end)."""


def union(intervals):
    """Return the same minutes as sorted, separate intervals."""
    merged = []
    for start, end in sorted(intervals):
        if merged and start < merged[-1][1]:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged


def difference(intervals, holes):
    """Return the minutes of `intervals` that are in none of `holes`."""
    result = []
    for start, end in union(intervals):
        for hole_start, hole_end in union(holes):
            if hole_start < end and hole_end > start:
                result.append((start, hole_start))
                start = hole_end
        result.append((start, end))
    return result
