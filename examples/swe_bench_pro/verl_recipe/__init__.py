# SPDX-License-Identifier: Apache-2.0
"""The same training as a verl (Ray) job: an engine for the actor, an agent loop for the rollout, a configuration."""
