# SPDX-License-Identifier: Apache-2.0
"""The documentation as a site (`make docs`): what MkDocs needs beside the pages of `docs/`."""
