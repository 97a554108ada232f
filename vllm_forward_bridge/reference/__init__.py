# SPDX-License-Identifier: Apache-2.0
"""The ops again in plain torch, written to be read."""
