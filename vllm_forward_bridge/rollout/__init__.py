# SPDX-License-Identifier: Apache-2.0
"""Engines that sample: the protocol and its implementations."""
