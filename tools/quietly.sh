#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs a command with its output in a log: `quietly LOG COMMAND...`. A terminal sees meanwhile what runs, for how long,
# and the last line of the log; files and pipes see nothing. If the command fails, the end of the log is shown; with
# `waiting`, it is not. The status is the command's. Scripts read this file for the functions; make runs it as a program.

SPINNER='|/-\'

quietly() {
  local code=0
  waiting "$@" || code=$?
  if [ "$code" -ne 0 ]; then
    tail -n 40 "$1" >&2
    printf "error: '%s ...' failed; the whole output is in %s\n" "$(basename "$2") ${*:3:3}" "$1" >&2
  fi
  return "$code"
}

waiting() {
  local log=$1 code=0 display=
  shift
  mkdir -p "$(dirname "$log")"
  : >"$log"
  if [ -t 2 ]; then
    _display "$log" "$(basename "$1") ${*:2}" 9>&- &  # a lock (9) is not for it to hold
    display=$!
  fi
  "$@" >"$log" 2>&1 </dev/null || code=$?
  if [ -n "$display" ]; then
    kill "$display" 2>/dev/null || true
    wait "$display" 2>/dev/null || true
    printf '\r\e[K' >&2
  fi
  return "$code"
}

# Until it is ended, or the script is gone: Ctrl-C does not reach what a script runs in the background.
_display() {
  local began=$EPOCHSECONDS elapsed_s line turn=0 wide
  while kill -0 $$ 2>/dev/null; do
    elapsed_s=$((EPOCHSECONDS - began))
    line=$(tail -c 400 "$1" 2>/dev/null | tr '\r' '\n' | grep -v '^ *$' | tail -n 1) || line=$2
    line="${SPINNER:turn++ % 4:1} $((elapsed_s / 60)):$(printf %02d $((elapsed_s % 60))) ${line//[^[:print:]]/}"
    wide=$(stty size <&2 2>/dev/null) || wide=
    wide=${wide#* }
    [ "${wide:-0}" -gt 1 ] || wide=80
    printf '\r\e[K%s' "${line:0:wide - 1}" >&2
    sleep 0.2
  done
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
  set -euo pipefail
  quietly "$@"
fi
