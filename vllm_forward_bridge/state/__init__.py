# SPDX-License-Identifier: Apache-2.0
"""What a sequence carries between calls."""
