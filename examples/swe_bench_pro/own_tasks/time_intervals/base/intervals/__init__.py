# SPDX-License-Identifier: Apache-2.0
"""Sets of half-open intervals of minutes."""
