# SPDX-License-Identifier: Apache-2.0
"""`sennit bench gpu`: what a GPU machine measures, part by part."""
