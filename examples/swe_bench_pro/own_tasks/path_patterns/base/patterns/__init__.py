# SPDX-License-Identifier: Apache-2.0
"""Match paths against patterns with `*`, `?` and `**`."""
