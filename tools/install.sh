#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# `install_packages REQUIREMENTS...` installs Python packages into $VENV for build.sh, which reads this file.
# In CI uv does it: in seconds of processor time, where pip takes a minute. Where uv cannot, pip does.

install_packages() {
  if [ "${CI:-}" = true ] && has_uv; then
    local settings
    mapfile -t settings < <("${pip[@]}" config list | "$VENV/bin/python" tools/uv_options.py)
    waiting "$LOG" "$VENV/bin/uv" pip install --python "$VENV/bin/python" "${settings[@]}" "$@" && return
  fi
  quietly "$LOG" "${pip[@]}" install "${compile[@]}" "$@"
}

has_uv() { [ -x "$VENV/bin/uv" ] || waiting "$LOG" "${pip[@]}" install --no-compile 'uv>=0.5'; }
