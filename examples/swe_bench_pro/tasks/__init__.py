# SPDX-License-Identifier: Apache-2.0
"""What the agent is asked and how it is graded: the columns of SWE-bench Pro, and where tasks come from."""
