# SPDX-License-Identifier: Apache-2.0
"""A cache with a size limit and entries that expire."""
