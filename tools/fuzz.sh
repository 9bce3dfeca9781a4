#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the fuzzers with clang and runs each for some seconds: fuzz.sh SECONDS, from the repository's root.
# What it learns stays in build/fuzz/corpus; an input that fails is left in build/fuzz and named.
set -euo pipefail
seconds=${1:?usage: fuzz.sh SECONDS}
. tools/quietly.sh

clang=$(.venv/bin/python -c 'from sennit.testbed import probes; print(probes.libfuzzer())')
if [[ -z $clang ]]; then
  echo "fuzz: skipped, no clang with a libFuzzer runtime (apt-get install clang libclang-rt-14-dev)"
  exit 0
fi
ran=
fuzz() {  # folder of the project, its fuzzers
  local folder=$1 build=build/fuzz/${1%%/*} name
  shift
  cmake -S "$folder" -B "$build" -G Ninja -DCMAKE_CXX_COMPILER="$clang" \
    -DCMAKE_CXX_COMPILER_LAUNCHER="$(command -v ccache || true)" --log-level=WARNING >/dev/null
  quietly "$build.log" nice cmake --build "$build"
  for name in "$@"; do
    mkdir -p "build/fuzz/corpus/$name"
    log=build/fuzz/$name.log
    quietly "$log" "$build/fuzz_$name" -max_total_time="$seconds" -max_len=2048 -len_control=0 -timeout=20 \
      -rss_limit_mb=2048 -artifact_prefix="build/fuzz/$name-" "build/fuzz/corpus/$name" "$folder/corpus/$name"
    echo "fuzz: fuzz_$name, $(grep '^Done' "$log" | tail -n 1)"
    ran+="<testcase name=\"$name\"/>"
  done
}
fuzz transport/csrc/tests/fuzz packet codec flow aggregation
fuzz offload/csrc/tests/fuzz records
mkdir -p build/rings
printf '<testsuite name="fuzz">%s</testsuite>\n' "$ran" >build/rings/fuzz.xml  # for the end of `make test`
