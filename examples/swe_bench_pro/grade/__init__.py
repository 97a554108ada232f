# SPDX-License-Identifier: Apache-2.0
"""From the tree that an agent left to an outcome: take the patch, look at it, run the tests elsewhere."""
