#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# `make try-wheels`: what a new user does, from nothing but a folder of wheels and the README. Runs the README's commands
# "Without a clone" word by word, as an unprivileged user with an empty home, without a compiler on the path and without
# a package index. As root, in namespaces such as a container has: no network but `lo`, nothing writable but the home,
# /tmp and a /dev/shm of 64 MB. Prints the seconds of each command. build/wheelhouse keeps what pip has downloaded
# beside our wheels.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. tools/quietly.sh

say() { printf 'try-wheels: %s\n' "$*"; }
house=$PWD/build/wheelhouse
mkdir -p "$house"
rm -f "$house"/sennit*.whl
say "collecting the wheels of what sennit needs"
quietly build/try-wheels.log .venv/bin/python -m pip --disable-pip-version-check download --find-links build/wheels \
  --constraint build/constraints.txt --dest "$house" 'sennit[train]' sennit-torch

# Another user can read neither this checkout nor root's home.
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
mkdir "$place/home"
cp -r "$house" "$place/home/wheelhouse"
.venv/bin/python tools/first_page.py README.md "$place/home"
cp tools/quietly.sh "$place/quietly.sh"
cat >"$place/steps.sh" <<'STEPS'
. "${BASH_SOURCE[0]%/*}/quietly.sh"
cd "$HOME"
for tool in cc gcc c++ g++ clang cmake ninja make; do
  ! command -v "$tool" >/dev/null || { echo "try-wheels: error: $tool is on the path" >&2; exit 1; }
done
elapsed() { echo "$((${EPOCHREALTIME/./} - ${1/./}))e-6"; }
typed() { eval "$1"; }  # in this shell, which has the activated environment
begin=$EPOCHREALTIME
while read -r command; do
  from=$EPOCHREALTIME
  waiting output.txt typed "$command" || { cat output.txt; echo "try-wheels: error: '$command' failed" >&2; exit 1; }
  printf '%6.1f s  %s\n' "$(elapsed "$from")" "$command"
  case $command in
    torchrun*)
      # Ranks share an output, so their lines may mix.
      grep -q '1\.0 \[0\.0, 10\.0\]' output.txt && grep -q '1\.0 \[1\.0, 11\.0\]' output.txt ||
        { cat output.txt; echo "try-wheels: error: not what an AllReduce of two ranks prints" >&2; exit 1; }
      printf '%6.1f s  from nothing to the first AllReduce\n' "$(elapsed "$begin")" ;;
    "sennit timeline"* | "sennit doctor"*) cat output.txt ;;
    "sennit demo"* | "sennit train"*) grep -E '^(AUC|speed|weights)' output.txt ;;
  esac
done <first_page.sh
from=$EPOCHREALTIME
sennit --help >output.txt
printf '%6.1f s  sennit --help\n' "$(elapsed "$from")"
STEPS

python=${PYTHON:-$(readlink -f "$(.venv/bin/python -c 'import sys; print(sys._base_executable)')")}
unprivileged=()
cat >"$place/enter.sh" <<'ENTER'
set -eu
place=$1; shift
mount --make-rprivate /
mount --bind "$place" /mnt
mount -o remount,bind,ro /
mount -t tmpfs -o mode=1777 tmpfs /tmp
mount -t tmpfs -o mode=1777,size=64m tmpfs /dev/shm
mount -t proc proc /proc
ip link set lo up
exec "$@"
ENTER
if [ "$(id -u)" -eq 0 ]; then
  chmod 755 "$place"
  chown -R 65534:65534 "$place/home"
  unprivileged=(unshare --mount --net --pid --ipc --fork bash "$place/enter.sh" "$place" setpriv --reuid 65534
    --regid 65534 --clear-groups --inh-caps=-all --bounding-set=-all --no-new-privs)
  inside=/mnt
  say "as the user nobody without capabilities, in namespaces of its own"
else
  inside=$place
  say "as $(id -un), in the namespaces of this shell"
fi
# `python3` of the page is the one that the wheels were made for.
mkdir "$place/bin"
ln -s "$python" "$place/bin/python3"
for tool in basename cat dirname grep mkdir sleep stty tail tr; do ln -s "$(command -v "$tool")" "$place/bin/$tool"; done
"${unprivileged[@]}" env -i HOME="$inside/home" PATH="$inside/bin" LANG=C.UTF-8 PIP_CONFIG_FILE=/dev/null \
  PIP_DISABLE_PIP_VERSION_CHECK=1 /bin/bash -eu "$inside/steps.sh"
