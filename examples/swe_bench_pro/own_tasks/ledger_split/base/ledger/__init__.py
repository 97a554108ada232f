# SPDX-License-Identifier: Apache-2.0
"""Money in whole cents, shared costs, and a report."""
