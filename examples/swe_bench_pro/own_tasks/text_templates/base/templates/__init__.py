# SPDX-License-Identifier: Apache-2.0
"""Fill names into text: `{{ user.name }}`."""
