# SPDX-License-Identifier: Apache-2.0
"""`sennit opi`: what a machine is, and disks that it lends over NVMe/TCP, over the gRPC interfaces of OPI.

OPI: the Open Programmable Infrastructure project, whose interfaces (opi-api v0.1.0) DPUs of several makers have.
"""
