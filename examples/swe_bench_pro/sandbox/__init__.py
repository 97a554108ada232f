# SPDX-License-Identifier: Apache-2.0
"""Where untrusted commands run: one protocol, three kinds of isolation, and a refusal when there is none."""
