# SPDX-License-Identifier: Apache-2.0
"""Figures that pages show, their pictures, and the pages that are made from them."""
