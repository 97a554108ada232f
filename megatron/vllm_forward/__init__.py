# SPDX-License-Identifier: Apache-2.0
"""Train a Megatron hybrid model on the forward of its vLLM rollout.

Public names come from the modules: `arguments.add_arguments`, `launch.session`, `build.build`, `spec.stack_spec`,
`coverage.check_coverage`, `weights`, `optimizer_hook`, `versions`. Nothing is imported here, because importing Megatron
takes seconds and the launcher must first look at the command line.
"""
