# SPDX-License-Identifier: Apache-2.0
"""Fixed-width records for a line printer of the store."""
