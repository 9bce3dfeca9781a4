# SPDX-License-Identifier: Apache-2.0
"""Transport: a group of ranks and its collectives, with a native data plane.

`communicator.Communicator` is a group, `config.Config` its settings. `plans` say what a rank does in a collective, and
`algorithms` write them. `choice` says which algorithm runs, `meeting` how ranks find each other, `oracle` what is
right. `csrc` is the native core, which runs the plans.

Importing this package loads no extension: plans, algorithms and the NumPy reference run without a build.
"""
