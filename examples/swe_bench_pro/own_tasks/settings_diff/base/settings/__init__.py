# SPDX-License-Identifier: Apache-2.0
"""Settings files of sections, and what changed between two."""
